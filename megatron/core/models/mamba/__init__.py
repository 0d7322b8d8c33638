"""Hybrid models: each layer is Mamba-2, attention, an MLP or experts."""

from megatron.core.models.mamba.mamba_model import MambaModel

__all__ = ["MambaModel"]
