"""State space duality: the recurrence of Mamba-2, token by token and in chunks."""
