"""Enumerations of the whole library."""

import enum


class ModelType(enum.Enum):
    """The structure of a model."""

    encoder_or_decoder = 1
    """One stack of layers: GPT, BERT."""
    encoder_and_decoder = 2
    """An encoder and a decoder: T5 in scripts of releases up to 0.11. It has no effect; the model itself determines its
    stacks."""
