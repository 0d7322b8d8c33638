"""Numbers that a layer reports beside the loss: gathered on the device, read when a log line is due.

A module that has any keeps a `Reported` under the name `reported`. Every number is a mean: `total` / `count`, both of
them sums over micro-batches and over all ranks that hold the layer's tokens (`tp_dp_cp`), each of which adds its part.
Ranks that hold the same tokens all add them: it cancels out.

Loads of experts are vectors of counts; what is read off them (the fullest expert, the entropy) is no mean, and is
computed when they have been summed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.utils.recompute_cache import run_once_under_recompute

EXPERT_LOAD = "moe_load"
"""How many tokens each expert of a layer took."""


@dataclass(frozen=True)
class Report:
    """One number of one layer."""

    name: str
    """As it stands on the log line, such as `load_balancing_loss`."""
    layer: int
    """Number of the layer, counted over the whole model from 1; predicting layers come after the last."""
    total: Tensor
    """float64 scalar on the device; of `EXPERT_LOAD`, the counts of all experts, [experts]."""
    count: Tensor
    """float64 scalar on the device."""


class Reported:
    """What one module has added since it was last read."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add this rank's part of a micro-batch: once, also where a layer is computed again. Without gradients, as in
        an evaluation, nothing is added."""
        if not torch.is_grad_enabled():
            return
        if not isinstance(count, Tensor):
            count = torch.full((), float(count), dtype=torch.float64, device=total.device)
        self._add(name, torch.stack([total.detach().double().reshape(()), count.detach().double().reshape(())]))

    def add_load(self, counts: Tensor) -> None:
        """Add how many of this rank's tokens each expert took, [experts]; as `add`, not without gradients."""
        if torch.is_grad_enabled():
            self._add(EXPERT_LOAD, counts.detach().double())

    def _add(self, name: str, numbers: Tensor) -> None:
        run_once_under_recompute((self, name), lambda: self._add_now(name, numbers))

    def _add_now(self, name: str, numbers: Tensor) -> None:
        self._sums[name] = self._sums[name] + numbers if name in self._sums else numbers

    def take(self) -> Iterator[Report]:
        """All that was added, which is then forgotten."""
        sums, self._sums = self._sums, {}
        for name, numbers in sums.items():
            is_load = name == EXPERT_LOAD
            total, count = (numbers, torch.ones_like(numbers[0])) if is_load else (numbers[0], numbers[1])
            yield Report(name, self.layer, total, count)


def take_reports(chunks: Iterable[nn.Module]) -> list[Report]:
    """What all modules of a rank's model chunks have added since the last call."""
    found: list[Report] = []
    for chunk in chunks:
        for module in chunk.modules():
            reported = getattr(module, "reported", None)
            if isinstance(reported, Reported):
                found += reported.take()
    return found
