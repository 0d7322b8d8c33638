"""The flags of the model that a Hugging Face config describes, without a folder of weights."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.conversion.families import architecture_in, family_in
from megatron.conversion.family import PREDICTION_LAYERS, TIE
from megatron.conversion.hub_defaults import Json
from megatron.training.config.flag_table import flag_table
from megatron.training.inspection.run_description import words_of


@dataclass(frozen=True)
class DescribedModel:
    """A model that config.json describes."""

    flags: list[str]
    """Words of a command line for the model; those of its tokenizer are not among them."""
    model_family: str
    """Family of the model, which determines the entry script."""
    vocab_size: int
    max_length: int | None
    """Largest sequence length; None if there is none."""


def describe_config(config: Mapping[str, Json], name: str = "config.json") -> DescribedModel:
    """Returns the flags for the keys of a config.json, as a new model of that class of transformers has them.

    Raises UserError, which begins with `name`, if the architecture or a key is unsupported.
    """
    family = family_in(architecture_in(config, name), name)
    keys = family.complete_config(dict(config), name)
    if keys.get(PREDICTION_LAYERS):  # transformers builds none of these layers
        keys[PREDICTION_LAYERS] = 0
    if family.unties:
        keys[TIE] = False
    fields = family.fields_of(keys, (), name)
    vocab_size = family.vocab_size_of(keys, name)
    flags = [word for field, value in fields.items() for word in words_of(flag_table()[field], value)]
    return DescribedModel(flags, family.model_family, vocab_size, fields.get("max_position_embeddings"))
