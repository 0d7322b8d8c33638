"""Sums of gradients over data parallel ranks: all-reduce or reduce-scatter."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.communication.collectives import (
    Group,
    Pending,
    averages_in_collective,
    group_rank,
    group_size,
    start_all_reduce,
    start_all_to_all_rows,
    start_reduce_scatter_rows,
)


@dataclass(frozen=True)
class Reduction:
    """How flat gradient tensors are summed over one group."""

    group: Group
    scale: float = 1.0
    """Factor of the gradients before the sum."""
    average_in_collective: bool = False
    """Whether the collective applies the factor 1 / (size of the group), if the backend can average. It always does so
    where that gives the same bits and leaves nothing to scale, because scaling reads and writes all gradients."""
    sum_in_main_dtype: bool = False
    """Whether shards are summed in float32 (or the gradients' own type, if it is wider) even if they are sent in a
    narrower type. Each rank then receives all addends of its shard by an all-to-all, instead of sums that are rounded
    on the way. This sends as many bytes as a reduce-scatter."""

    def start_all_reduce(self, gradients: Tensor, wire_dtype: torch.dtype) -> Pending:
        """Starts the sum of `gradients` [n], sent in `wire_dtype`. The result is written to `gradients`, which must not
        be used before it has arrived."""
        wire, op = self._scaled(gradients, wire_dtype)
        pending = start_all_reduce(wire, self.group, op)
        return pending if wire is gradients else pending.then(gradients.copy_)

    def start_reduce_scatter(self, gradients: Tensor, wire_dtype: torch.dtype) -> Pending:
        """Starts the sum of this rank's shard of `gradients` [n * ranks], sent in `wire_dtype`.

        The result [n] has that type, the gradients' own or float32. It can be a view of `gradients`, which must not be
        used before the result has arrived.
        """
        wire, op = self._scaled(gradients, wire_dtype)
        ranks = group_size(self.group)
        main = torch.promote_types(gradients.dtype, torch.float32)
        if self.sum_in_main_dtype and wire.dtype != main and ranks > 1 and op is ReduceOp.SUM:
            return start_all_to_all_rows(wire, self.group).then(
                lambda all_of: all_of.view(ranks, -1).sum(0, dtype=main)
            )
        size = gradients.numel() // ranks
        shard = wire[group_rank(self.group) * size :][:size]
        return start_reduce_scatter_rows(wire, self.group, out=shard, op=op)

    def _scaled(self, gradients: Tensor, wire_dtype: torch.dtype) -> tuple[Tensor, ReduceOp.RedOpType]:
        """Returns the tensor to send (the gradients, scaled in place, or a scaled copy in another type) and the
        reduction operation."""
        ranks, scale = group_size(self.group), self.scale
        other = wire_dtype != gradients.dtype and ranks > 1
        # NCCL multiplies each addend by 1 / ranks, which it rounds to the type that is sent.
        is_same = wire_dtype == gradients.dtype and wire_dtype.itemsize >= 4 and scale * ranks == 1.0
        averaging = (self.average_in_collective or is_same) and averages_in_collective(gradients, self.group)
        averaging = averaging and not (wire_dtype.itemsize < 4 and self.sum_in_main_dtype)
        if averaging:
            scale *= ranks
        op = ReduceOp.AVG if averaging else ReduceOp.SUM
        if other:
            return torch.mul(gradients, scale, out=gradients.new_empty(gradients.shape, dtype=wire_dtype)), op
        return (gradients.mul_(scale) if scale != 1.0 else gradients), op
