"""TrainState: the counts that training changes and a checkpoint keeps, beside weights and optimizer state."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.exceptions import UserError


@dataclass
class TrainState:
    """Counts since the beginning of the run, over all ranks. Only the training loop changes them."""

    iteration: int = 0
    """Iterations done."""
    consumed_train_samples: int = 0
    """Samples that training took from its data. Also the number of the next sample, from 0."""
    skipped_train_samples: int = 0
    """Those of the consumed samples whose iterations were skipped on request."""
    consumed_valid_samples: int = 0
    """Samples of all evaluations on the validation set. With --eval-fresh-samples, also the next one's first."""
    consumed_tokens: int = 0
    """Tokens of the consumed training samples."""
    floating_point_operations_so_far: float = 0.0
    """Operations of the model, computed by formula."""

    def add_step(self, samples: int, tokens: int, operations: float = 0.0) -> None:
        """Counts an iteration that trained on this number of samples and tokens, with `operations` of the model."""
        self.iteration += 1
        self.consumed_train_samples += samples
        self.consumed_tokens += tokens
        self.floating_point_operations_so_far += operations

    def add_skipped_step(self, samples: int) -> None:
        """Counts an iteration whose samples were read and not trained on."""
        self.iteration += 1
        self.consumed_train_samples += samples
        self.skipped_train_samples += samples

    def to_json(self) -> dict[str, int | float]:
        """Returns the counts by name, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], source: str = "the training state") -> "TrainState":
        """Builds the state that `to_json` described. Counts that an older release did not save start at 0. Raises
        UserError, naming the source, for an unknown count."""
        unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise UserError(f"{source} holds {', '.join(unknown)}, which this release does not know")
        return cls(**fields)

    def restore(self, other: "TrainState") -> None:
        """Copies another state's counts into this object, so that all references to this object see them."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(other, field.name))
