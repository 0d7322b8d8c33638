"""Enumerations of the whole library."""

import enum


class ModelType(enum.Enum):
    """The structure of a model."""

    encoder_or_decoder = 1

    @property
    def encoder_and_decoder(self) -> "ModelType":
        """Former name of the type of T5, kept for scripts. There is only one type."""
        return ModelType.encoder_or_decoder
