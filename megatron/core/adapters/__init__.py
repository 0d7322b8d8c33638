"""Low-rank adapters of linear layers whose weights stay frozen: LoRA and DoRA."""
