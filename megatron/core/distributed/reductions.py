"""Sums of gradients over data parallel ranks: whole on every rank, or each rank's own part."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.collectives import (
    Group,
    Pending,
    averages_in_collective,
    group_rank,
    group_size,
    start_all_reduce,
    start_all_to_all_rows,
    start_reduce_scatter_rows,
)


class PendingReduction:
    """A sum under way. `wait` gives it; on CUDA, to kernels that come later."""

    def __init__(self, pending: Pending, finish: Callable[[Tensor], Tensor] | None = None) -> None:
        self._pending = pending
        self._finish = finish

    def wait(self) -> Tensor:
        result = self._pending.wait()
        return result if self._finish is None else self._finish(result)


@dataclass(frozen=True)
class Reduction:
    """How flat tensors of gradients are summed over one group."""

    group: Group
    scale: float = 1.0
    """Multiplies gradients before the sum."""
    average_in_collective: bool = False
    """Leave the part of the scale that is 1 / (size of the group) to the collective, where the backend can do it."""
    sum_in_main_dtype: bool = False
    """A part that is sent in a narrower type is summed in the gradients' own: every rank gets all addends of its part,
    instead of sums that were rounded on their way. The bytes are those of a reduce-scatter."""

    def start_whole(self, gradients: Tensor, wire_dtype: torch.dtype) -> PendingReduction:
        """Begin the sum of `gradients` [n], sent in `wire_dtype`. It ends in the same memory, which may be used for
        nothing else until then."""
        wire, op = self._scaled(gradients, wire_dtype)
        if group_size(self.group) == 1 or wire is gradients:
            return PendingReduction(start_all_reduce(wire, self.group, op))
        return PendingReduction(start_all_reduce(wire, self.group, op), gradients.copy_)

    def start_part(self, gradients: Tensor, wire_dtype: torch.dtype) -> PendingReduction:
        """Begin the sum of this rank's part of `gradients` [n * ranks], sent in `wire_dtype`: [n], of that type or of
        the gradients' own. It may lie in the memory of `gradients`, which may be used for nothing else until then."""
        wire, op = self._scaled(gradients, wire_dtype)
        ranks = group_size(self.group)
        if self.sum_in_main_dtype and wire is not gradients and op is ReduceOp.SUM:
            addends = start_all_to_all_rows(wire, self.group)
            return PendingReduction(addends, lambda all_of: all_of.view(ranks, -1).sum(0, dtype=gradients.dtype))
        size = gradients.numel() // ranks
        part = wire[group_rank(self.group) * size :][:size]
        return PendingReduction(start_reduce_scatter_rows(wire, self.group, out=part, op=op))

    def _scaled(self, gradients: Tensor, wire_dtype: torch.dtype) -> tuple[Tensor, ReduceOp.RedOpType]:
        """What is sent: the gradients themselves, scaled in place, or a narrower copy; and how it is added up."""
        ranks, scale = group_size(self.group), self.scale
        narrow = wire_dtype != gradients.dtype and ranks > 1
        averaging = self.average_in_collective and averages_in_collective(gradients, self.group)
        averaging = averaging and not (narrow and self.sum_in_main_dtype)
        if averaging:
            scale *= ranks
        op = ReduceOp.AVG if averaging else ReduceOp.SUM
        if narrow:
            return torch.mul(gradients, scale, out=gradients.new_empty(gradients.shape, dtype=wire_dtype)), op
        return (gradients.mul_(scale) if scale != 1.0 else gradients), op
