"""Hybrid models: each layer is Mamba-2, a delta net, attention, an MLP or experts."""

from megatron.core.models.hybrid.hybrid_model import HybridModel

__all__ = ["HybridModel"]
