"""Enumerations that the whole library shares."""

import enum


class ModelType(enum.Enum):
    """What a model is made of, as the training app asks for it."""

    encoder_or_decoder = 1

    @property
    def encoder_and_decoder(self) -> "ModelType":
        """Kept for scripts that still name the type of T5 apart; there is one type."""
        return ModelType.encoder_or_decoder
