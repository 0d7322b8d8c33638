"""All-to-all between all heads of a part of each row and some heads of whole rows (Jacobs et al. 2023, "DeepSpeed
Ulysses").

One autograd operation starts an exchange and another one waits for it. Operations between the two overlap with the
exchange, in forward and also in backward, which runs the operations in reverse order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import Group, Pending, gather_rows, start_all_to_all_rows
from megatron.core.context_parallel.splitting import in_natural_order, in_rank_order


def share_keys(key: Tensor, heads: int, ranks: int) -> Tensor:
    """Returns keys [s, b, g, d] with repeated heads, so that each rank's equal share of key heads contains exactly the
    keys of its equal share of the `heads` query heads. Nothing is repeated if the ranks divide the key heads."""
    pack = heads // key.shape[2]  # query heads that share a key head
    kept_together = math.gcd(heads // ranks, pack)
    return key if kept_together == pack else key.repeat_interleave(pack // kept_together, dim=2)


def in_pieces(heads: Tensor, ranks: int, count: int) -> list[Tensor]:
    """Splits heads [s, b, n, d] into `count` tensors [s, b, n / count, d], each with an equal share for each rank."""
    pieces = heads.unflatten(2, (ranks, count, -1)).unbind(3)  # [s, b, ranks, n / (ranks * count), d] each
    return [piece.flatten(2, 3) for piece in pieces]


def from_pieces(pieces: Sequence[Tensor], ranks: int) -> Tensor:
    """Computes the inverse of `in_pieces`."""
    return torch.stack([piece.unflatten(2, (ranks, -1)) for piece in pieces], 3).flatten(2, 4)


@dataclass(frozen=True)
class PendingHeads:
    """Heads of whole rows that are being sent to this rank."""

    rows: "_AllToAll"
    shapes: list[tuple[int, int, int]]
    """Shape of each tensor without its rows: [b, n, d]."""
    ranks: int

    def wait(self) -> list[Tensor]:
        """Returns each tensor [ranks * s, b, n, d], rows in the order of the row."""
        widths = [math.prod(shape) for shape in self.shapes]
        parts = in_natural_order(self.rows.wait(), self.ranks).split(widths, 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self.shapes, strict=True)]


def start_to_heads(tensors: Sequence[Tensor], group: Group, ranks: int) -> PendingHeads:
    """Starts to exchange each tensor [s, b, ranks * n, d] for [ranks * s, b, n, d], all as one message."""
    pieces = [tensor.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).flatten(2) for tensor in tensors]
    shapes = [(tensor.shape[1], tensor.shape[2] // ranks, tensor.shape[3]) for tensor in tensors]
    return PendingHeads(_AllToAll(torch.cat(pieces, 2).flatten(0, 1), group), shapes, ranks)


@dataclass(frozen=True)
class PendingReturn:
    """All heads of this rank's part of the rows, being sent back."""

    rows: "_AllToAll"
    ranks: int

    def wait(self) -> Tensor:
        """Returns [s, b, ranks * n, d]."""
        received = self.rows.wait().unflatten(0, (self.ranks, -1))  # [ranks, s, b, n, d]
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def start_to_rows(heads: Tensor, group: Group, ranks: int) -> PendingReturn:
    """Starts to send heads [ranks * s, b, n, d] back to the ranks of their rows."""
    return PendingReturn(_AllToAll(in_rank_order(heads, ranks), group), ranks)


def whole_rows_of(mask: Tensor, group: Group, ranks: int) -> Tensor:
    """Gathers a mask [.., .., s, keys] of this rank's queries into one for the queries of the group, in row order."""
    rows = mask.permute(2, 0, 1, 3).contiguous()
    return in_natural_order(gather_rows(rows.to(torch.uint8), group), ranks).permute(1, 2, 0, 3).bool()


class _AllToAll:
    """An all-to-all of rows in progress, and the all-to-all of its gradient."""

    def __init__(self, rows: Tensor, group: Group) -> None:
        self.group = group
        self.forward: Pending | None = None
        self.backward: Pending | None = None
        self._rows: Tensor | None = _Start.apply(rows, self)

    def wait(self) -> Tensor:
        """Returns the parts of all ranks in rank order. Call it once."""
        rows, self._rows = self._rows, None  # the graph refers to this object: avoids a reference cycle
        return _Wait.apply(rows, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _AllToAll) -> Tensor:
        ctx.exchange = exchange
        exchange.forward = start_all_to_all_rows(rows, exchange.group)
        return exchange.forward.tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The gradient is still being received. Only `_Wait` can have passed it on.
        pending, ctx.exchange.backward = ctx.exchange.backward, None
        assert pending is not None and pending.tensor.data_ptr() == gradient.data_ptr()
        return pending.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _AllToAll) -> Tensor:
        ctx.exchange = exchange
        assert exchange.forward is not None
        received, exchange.forward = exchange.forward.wait(), None
        return received.view_as(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.backward = start_all_to_all_rows(gradient, ctx.exchange.group)
        return ctx.exchange.backward.tensor, None
