"""Megatron-LM's names of fused operations."""
