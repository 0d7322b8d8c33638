"""Enumerations of the transformer's parts."""

import enum

from megatron.core.declarations.enums import ModelType

__all__ = ["AttnBackend", "AttnMaskType", "AttnType", "LayerType", "ModelType"]


class LayerType(enum.Enum):
    """A letter of a pipeline layout."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


class AttnType(enum.Enum):
    """Whether a layer attends to its own tokens or to those of another sequence."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """The keys that a query attends to."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class AttnBackend(enum.Enum):
    """The implementation of scaled dot-product attention. Megatron-LM has all but `flex`."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
    flex = 6
