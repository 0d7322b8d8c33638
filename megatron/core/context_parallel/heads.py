"""Some heads of whole rows in place of all heads of a part of each row, and back (all-to-all; Jacobs et al. 2023,
"DeepSpeed Ulysses")."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import Group, all_to_all_rows, gather_rows
from megatron.core.context_parallel.splitting import in_natural_order, in_rank_order


def share_keys(key: Tensor, heads: int, ranks: int) -> Tensor:
    """Keys [s, b, g, d] with their heads repeated as often as needed, so that an equal share of them is what an equal
    share of the `heads` query heads uses: not at all where the ranks divide the groups of keys."""
    together = heads // key.shape[2]  # query heads that share a key head
    kept_together = math.gcd(heads // ranks, together)
    return key if kept_together == together else key.repeat_interleave(together // kept_together, dim=2)


def to_heads(tensors: Sequence[Tensor], group: Group, ranks: int) -> list[Tensor]:
    """Each [s, b, n, d] -> [ranks * s, b, n / ranks, d], rows in their natural order, in one exchange."""
    pieces = [tensor.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).flatten(2) for tensor in tensors]
    received = _all_to_all(torch.cat(pieces, 2).flatten(0, 1), group)  # [ranks * s, width]
    shapes = [(tensor.shape[1], tensor.shape[2] // ranks, tensor.shape[3]) for tensor in tensors]
    widths = [math.prod(shape) for shape in shapes]
    rows = in_natural_order(received, ranks).split(widths, 1)
    return [part.unflatten(1, shape) for part, shape in zip(rows, shapes, strict=True)]


def to_rows(heads: Tensor, group: Group, ranks: int) -> Tensor:
    """The way back: [ranks * s, b, n, d] -> [s, b, ranks * n, d]."""
    received = _all_to_all(in_rank_order(heads, ranks), group).unflatten(0, (ranks, -1))  # [ranks, s, b, n, d]
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def whole_rows_of(mask: Tensor, group: Group, ranks: int) -> Tensor:
    """A mask [.., .., s, keys] for the queries of this rank, made one for those of the group, in their order."""
    rows = mask.permute(2, 0, 1, 3).contiguous()
    return in_natural_order(gather_rows(rows.to(torch.uint8), group), ranks).permute(1, 2, 0, 3).bool()


def _all_to_all(rows: Tensor, group: Group) -> Tensor:
    return _AllToAll.apply(rows, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_to_all_rows(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_to_all_rows(gradient, ctx.group), None
