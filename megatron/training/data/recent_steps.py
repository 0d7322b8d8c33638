"""Keeps the micro-batches of the last steps on the host, for the case that a step turns out not to be finite."""

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.training.state import TrainState

LEAST_STEPS = 4
"""Smallest number of steps to keep: all ranks learn of a non-finite value about two steps later."""
MOST_STEPS = 64
"""Largest number of steps to keep, however small they are."""
MOST_BYTES = 256 << 20
"""Bytes of host memory above which a rank drops its oldest steps, down to `LEAST_STEPS`."""


@dataclass
class RecentStep:
    """One step: the counts before it, and the micro-batches that this rank read, in order."""

    before: TrainState
    batches: list[Any] = field(default_factory=list)
    nbytes: int = 0
    """Bytes of the micro-batches' tensors."""

    @property
    def iteration(self) -> int:
        """Number of the step, from 1."""
        return self.before.iteration + 1


class RecentSteps:
    """The last steps, the newest last: at least `LEAST_STEPS`, and up to `MOST_STEPS` as far as `MOST_BYTES` allow."""

    def __init__(self) -> None:
        self.steps: deque[RecentStep] = deque()
        self._nbytes = 0
        """Bytes of all steps."""

    def begin(self, state: TrainState) -> None:
        """Begins a step, before which the counts are `state`."""
        while len(self.steps) >= LEAST_STEPS and (self._nbytes > MOST_BYTES or len(self.steps) >= MOST_STEPS):
            self._nbytes -= self.steps.popleft().nbytes
        self.steps.append(RecentStep(dataclasses.replace(state)))

    def add(self, batch: object) -> None:
        """Adds a micro-batch to the step that began last. Micro-batches before the first step are not kept."""
        if self.steps:
            size = sum(tensor.nbytes for tensor in fields_of(batch).values())
            self.steps[-1].batches.append(batch)
            self.steps[-1].nbytes += size
            self._nbytes += size

    def find(self, iteration: int) -> RecentStep | None:
        """Returns the step of this number (from 1); None if it is no longer kept."""
        return next((step for step in self.steps if step.iteration == iteration), None)


def fields_of(batch: object) -> dict[str, Tensor]:
    """Returns the tensors of a micro-batch by name: those of a mapping, or of a dataclass's fields. Other batches have
    none."""
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = {entry.name: getattr(batch, entry.name) for entry in dataclasses.fields(batch)}
    items = batch.items() if isinstance(batch, Mapping) else ()
    return {str(name): value for name, value in items if isinstance(value, Tensor)}
