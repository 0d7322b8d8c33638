"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464): its definition, token by token, and in chunks of
tokens."""
