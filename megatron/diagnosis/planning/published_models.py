"""Published models as the planner sees them: the recipes of the program, split into model and training."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.training.config.recipes.catalogue import Recipe, recipes

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
    return tuple(map(_model, recipes().values()))


def _model(recipe: Recipe) -> PublishedModel:
    of_training = {key for key in recipe.flags if key in _OF_TRAINING or key.startswith(_TRAINING_PREFIXES)}
    return PublishedModel(
        name=recipe.name,
        family="mamba" if "hybrid_layer_pattern" in recipe.flags else recipe.model_family,
        flags={key: value for key, value in recipe.flags.items() if key not in of_training},
        training={key: recipe.flags[key] for key in recipe.flags if key in of_training},
        vocab_size=recipe.vocabulary,
        parameters=recipe.parameters,
    )
