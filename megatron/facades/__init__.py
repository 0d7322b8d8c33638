"""Megatron-LM's names for scripts. They act on the current run, and only user scripts import them."""
