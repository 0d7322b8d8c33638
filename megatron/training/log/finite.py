"""Names losses and gradients that are not finite: rank, iteration, micro-batch and samples."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class NonFinite:
    """A loss or gradient that is NaN or infinite, as seen by the rank that holds the batch."""

    rank: int
    iteration: int
    what: str
    """Name of the value: `lm loss`, `gradient of the embedding`, `gradient norm`."""
    value: float | None
    """The value; None if it is only known that it is not finite."""
    microbatch: int | None
    """Number of the micro-batch on this rank, from 0; None: the whole global batch."""
    sample_ids: tuple[int, ...] = ()
    """Samples of the micro-batch, or of the whole iteration, on this rank; empty if the batch has no sample ids."""

    def __str__(self) -> str:
        value = "is not finite" if self.value is None else f"is {self.value}"
        batch = "in every micro-batch together" if self.microbatch is None else f"in micro-batch {self.microbatch}"
        samples = f"samples {_shorten(self.sample_ids)}" if self.sample_ids else "samples unknown"
        return f"rank {self.rank}, iteration {self.iteration}: {self.what} {value} {batch}, {samples}"


def name_non_finite(
    rank: int,
    iteration: int,
    losses: Sequence[Mapping[str, float]],
    gradients_finite: Sequence[bool],
    grad_norm: float | None,
    sample_ids: Sequence[Sequence[int]],
) -> list[NonFinite]:
    """Returns all non-finite values that this rank saw in one iteration, the most specific first.

    `losses` has a mapping for each micro-batch. `gradients_finite` has a flag for each micro-batch if gradients were
    probed. The gradient norm belongs to the whole global batch, so it is named only if nothing more specific was found.
    """
    found = []
    for index in range(max(len(losses), len(gradients_finite))):
        samples = tuple(sample_ids[index]) if index < len(sample_ids) else ()
        bad = [(name, value) for name, value in _at(losses, index, {}).items() if not math.isfinite(value)]
        found += [NonFinite(rank, iteration, name, value, index, samples) for name, value in bad]
        if not bad and not _at(gradients_finite, index, True):
            found.append(NonFinite(rank, iteration, "gradient at the embedding", None, index, samples))
    if not found and grad_norm is not None and not math.isfinite(grad_norm):
        samples = tuple(sample for batch in sample_ids for sample in batch)
        found.append(NonFinite(rank, iteration, "gradient norm", grad_norm, None, samples))
    return found


def _at(items: Sequence[object], index: int, default: object) -> Any:
    return items[index] if index < len(items) else default


def _shorten(ids: Sequence[int], limit: int = 64) -> str:
    text = ", ".join(str(number) for number in ids[:limit])
    return f"[{text}]" if len(ids) <= limit else f"[{text}, ... {len(ids)} in all]"


class GradientProbe:
    """Checks in each micro-batch's backward whether the gradient of a module's output is finite.

    Attach it to the embedding: the gradient of its output has passed through every layer, so the probe finds the
    micro-batch that made the gradients non-finite. It costs one read of [t, h] values. It copies nothing to the host.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forwards = 0
        self._finite: dict[int, Tensor] = {}
        """Flags by the number of the forward pass since the last `take_tensors`."""
        self._handle: RemovableHandle = module.register_forward_hook(self._watch_output)

    def _watch_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(functools.partial(self._look, self._forwards))
            self._forwards += 1

    def _look(self, number: int, gradient: Tensor) -> None:
        self._finite[number] = torch.isfinite(gradient.detach()).all()

    def take_tensors(self) -> list[Tensor]:
        """Returns a bool scalar on the device for each forward and backward since the last call, in the order of the
        forwards."""
        taken = [self._finite[number] for number in sorted(self._finite)]
        self._forwards, self._finite = 0, {}
        return taken

    def add_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Adds the flags that `take_tensors` returned, after those of earlier micro-batches."""
        for flag in tensors:
            self._finite[self._forwards] = flag
            self._forwards += 1

    def remove(self) -> None:
        """Removes the probe from the module."""
        self._handle.remove()
