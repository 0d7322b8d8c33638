"""Gathers whole rows from all ranks' parts, with a gradient."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import Group, all_to_all_rows, gather_rows
from megatron.core.context_parallel.splitting import in_natural_order, in_rank_order
from megatron.core.ops.precision import at_least_float32
from megatron.core.utils.autograd_context import AutogradContext


def gather_whole_rows(part: Tensor, group: Group, ranks: int) -> Tensor:
    """Gathers the parts [s, ...] of all ranks into whole rows [ranks * s, ...], in the order of the row. Backward sums
    the gradients of all ranks in float32 at least."""
    return _GatherWholeRows.apply(part, group, ranks)


class _GatherWholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, part: Tensor, group: Group, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return in_natural_order(gather_rows(part, group), ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows = all_to_all_rows(in_rank_order(gradient, ctx.ranks), ctx.group)
        total = torch.sum(rows.unflatten(0, (ctx.ranks, -1)), 0, dtype=at_least_float32(rows.dtype))
        return total.to(gradient.dtype), None, None
