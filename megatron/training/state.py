"""TrainState: where a run is. All that training changes and a checkpoint keeps, weights and optimizer aside."""

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
    """Samples that training took from its data, so the number of the next one."""
    skipped_train_samples: int = 0
    """Those among them whose iterations were passed over on purpose."""
    consumed_valid_samples: int = 0
    """Samples that evaluation took from the validation set."""
    consumed_tokens: int = 0
    """Tokens of the consumed training samples."""
    floating_point_operations_so_far: float = 0.0
    """Of the model, by formula."""

    def to_json(self) -> dict[str, int | float]:
        """Returns the counts by name, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TrainState":
        """Builds the state that `to_json` described. Counts that an older release did not save start at 0. Raises
        UserError for an unknown count."""
        unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise UserError(f"the training state holds {', '.join(unknown)}, which this release does not know")
        return cls(**fields)

    def restore(self, other: "TrainState") -> None:
        """Copies another state's counts into this object, so that everyone who holds this object sees them."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(other, field.name))
