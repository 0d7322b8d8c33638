"""Published models as the planner sees them: the recipes of the program, split into model and training."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_OF_TRAINING = (
    "lr",
    "min_lr",
    "seq_length",
    "max_position_embeddings",
    "weight_decay",
    "clip_grad",
    "global_batch_size",
)
_TRAINING_PREFIXES = ("adam_", "lr_", "train_", "muon_")
_ABOUT = ("parameters", "vocabulary", "source")


@dataclass(frozen=True)
class PublishedModel:
    """A published architecture."""

    name: str
    family: str
    """Entry script that trains it: gpt, bert, t5 or mamba."""
    flags: Mapping[str, Any]
    """Model flags by field."""
    training: Mapping[str, Any]
    """Flags of its training by field, such as lr."""
    vocab_size: int
    parameters: int
    """Published number of parameters."""

    @property
    def positions(self) -> int:
        """Learned positions; 0 for a model without them."""
        learned = self.flags.get("position_embedding_type", "learned_absolute") == "learned_absolute"
        return int(self.training["max_position_embeddings"]) if learned else 0

    def count(self, vocab_size: int | None, positions: int) -> int:
        """Returns the parameters with another vocabulary and another number of learned positions."""
        h = self.flags["hidden_size"]
        copies = 2 if self.flags.get("untie_embeddings_and_output_weights") else 1
        more_entries = (vocab_size or self.vocab_size) - self.vocab_size
        more_positions = positions - self.positions if self.positions else 0
        return int(self.parameters + h * (copies * more_entries + more_positions))


@cache
def published_models() -> tuple[PublishedModel, ...]:
    """Returns all published models, in the order of the recipes."""
    found = []
    for file in sorted(files("megatron.training.config").joinpath("recipes").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            content = tomllib.loads(file.read_text("utf-8"))
            found += [_model(content, name, values) for name, values in content["recipes"].items()]
    return tuple(found)


def _model(content: Mapping[str, Any], name: str, values: Mapping[str, Any]) -> PublishedModel:
    every = {**content.get("flags", {}), **values}
    flags = {key: value for key, value in every.items() if key not in _ABOUT}
    training = {key: value for key, value in flags.items() if key in _OF_TRAINING or key.startswith(_TRAINING_PREFIXES)}
    model = {key: value for key, value in flags.items() if key not in training}
    return PublishedModel(
        name, _family(content, model), model, training, every.get("vocabulary", 0), every.get("parameters", 0)
    )


def _family(content: Mapping[str, Any], flags: Mapping[str, Any]) -> str:
    return "mamba" if "hybrid_layer_pattern" in flags else str(content.get("model_family", "gpt"))
