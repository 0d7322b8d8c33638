"""The arguments of an update rule: segments of flat buffers, and the inputs of one step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.optimizer.state_storage import StateTensor


@dataclass(frozen=True)
class FlatSegments:
    """Segments of one parameter group, with equal types and devices. The i-th entries of all lists belong together."""

    weights: list[Tensor]
    gradients: list[Tensor]
    moments: dict[str, list[Tensor]]
    model_weights: list[Tensor | None]
    """The weights in the model's narrower type; None if the model computes with `weights` themselves."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.weights[0].dtype


@dataclass(frozen=True)
class StoredSegments:
    """Segments of one parameter group whose state is stored in narrow types. The lists correspond to those of
    `FlatSegments`."""

    weights: list[StateTensor]
    gradients: list[Tensor]
    moments: dict[str, list[StateTensor]]
    model_weights: list[Tensor | None]


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step, as scalar tensors on the device."""

    count: Tensor
    """float32: number of updates including this one."""
    divisor: Tensor
    """float64: loss scale times clipping; gradients are divided by it."""
    skip: Tensor
    """bool: whether the step must leave weights and moments unchanged."""


def plain_segments(
    segments: FlatSegments, moments: Sequence[str]
) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor | None]]:
    """Yields weight, gradient, moments and the model's weight of each segment. `moments` names the moments in order."""
    states = zip(*(segments.moments[name] for name in moments), strict=True)
    yield from zip(segments.weights, segments.gradients, states, segments.model_weights, strict=True)


def with_main_gradients(segments: FlatSegments) -> Iterator[FlatSegments]:
    """Yields the segments unchanged. If gradients are narrower than the weights, yields the segments one by one with
    gradients in the type of the weights."""
    if all(gradient.dtype == segments.dtype for gradient in segments.gradients):
        yield segments
        return
    for place, gradient in enumerate(segments.gradients):
        yield FlatSegments(
            [segments.weights[place]],
            [gradient.to(segments.dtype)],
            {name: [moments[place]] for name, moments in segments.moments.items()},
            [segments.model_weights[place]],
        )


def round_into_model(segments: FlatSegments) -> None:
    """Rounds the weights into the model's weights."""
    for weight, model_weight in zip(segments.weights, segments.model_weights, strict=True):
        if model_weight is not None:
            model_weight.copy_(weight)


def replace(skip: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """Copies the second tensor of each pair into the first, or changes nothing if `skip` (a bool scalar) is set."""
    for old, new in pairs:
        old.copy_(torch.where(skip, old, new))
