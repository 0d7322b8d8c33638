"""Hybrid models: layers of Mamba-2, attention, MLP or experts alone."""

from megatron.core.models.mamba.mamba_model import MambaModel

__all__ = ["MambaModel"]
