"""The arguments of an update: segments of flat buffers, and the inputs of one step."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.optimizer.state_storage import StateTensor


@dataclass(frozen=True)
class StateSegment:
    """A range of a unit's shard whose parameters are of one group: gradients, and the state, which may be in host
    memory."""

    weights: StateTensor
    gradient: Tensor
    moments: Mapping[str, StateTensor]
    model_weights: Tensor | None
    """The weights in the model's narrower type; None if the model computes with `weights` themselves."""
    has_main_weights: bool
    """Whether there are main weights. Otherwise `weights` are the model's weights, which stay on the device."""

    def part(self, start: int, stop: int) -> "StateSegment":
        """Returns the elements [start, stop) in the same memory. `start` is a multiple of SCALE_BLOCK."""
        return StateSegment(
            self.weights.part(start, stop),
            self.gradient[start:stop],
            {name: moment.part(start, stop) for name, moment in self.moments.items()},
            None if self.model_weights is None else self.model_weights[start:stop],
            self.has_main_weights,
        )

    @property
    def on_host(self) -> list[StateTensor]:
        """The tensors of an offloaded segment that are in host memory."""
        return [*([self.weights] if self.has_main_weights else []), *self.moments.values()]

    def on_device(self, states: Sequence[StateTensor]) -> "StateSegment":
        """Returns the segment with these tensors in place of `on_host`."""
        rest = deque(states)
        weights = rest.popleft() if self.has_main_weights else self.weights
        moments = dict(zip(self.moments, rest, strict=True))
        return StateSegment(weights, self.gradient, moments, self.model_weights, self.has_main_weights)


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step, as scalar tensors on the device."""

    count: Tensor
    """float32: number of updates including this one."""
    divisor: Tensor
    """float64: loss scale times clipping; gradients are divided by it."""
    skip: Tensor
    """bool: whether the step must leave weights and moments unchanged."""


def replace(skip: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """Copies the second tensor of each pair into the first, or changes nothing if `skip` (a bool scalar) is set."""
    for old, new in pairs:
        old.copy_(torch.where(skip, old, new))
