"""Attention kernels, and which of them computes what."""
