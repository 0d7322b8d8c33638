"""Exchanges of rows between ranks whose start and finish are apart, in forward and in backward alike.

What an autograd graph has between the two, such as the shared experts, is computed while rows are under way: in
forward because it is called there, in backward because nodes run in the reverse order of their making. What has begun
and is not awaited yet never leaves the two nodes that know of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import (
    Group,
    Pending,
    group_size,
    start_all_to_all_rows,
    start_gather_rows,
    start_reduce_scatter_rows,
)
from megatron.core.micro_batch import CooperativeTurn

Start = Callable[[Tensor], "Pending | PendingRowSum"]


@dataclass(frozen=True)
class Route:
    """How rows go to other ranks, and how their gradient comes back."""

    go: Start
    come_back: Start

    def reversed(self) -> "Route":
        """For what comes back in forward."""
        return Route(self.come_back, self.go)


def all_to_all_route(group: Group, sent: Sequence[int], received: Sequence[int]) -> Route:
    """`sent[i]` rows go to rank i of the group, from which `received[i]` come; both lie in group order."""
    return Route(
        lambda rows: start_all_to_all_rows(rows, group, received, sent),
        lambda rows: start_all_to_all_rows(rows, group, sent, received),
    )


def gather_route(group: Group) -> Route:
    """All ranks' rows, equally many of each, come to every rank; back goes the sum of their gradients."""
    return Route(lambda rows: start_gather_rows(rows, group), lambda rows: start_reduce_scatter_rows(rows, group))


def uneven_gather_route(group: Group, sizes: Sequence[int], rank: int) -> Route:
    """As `gather_route`, of ranks that have `sizes` rows each, of which this one is number `rank`; addends are added
    in float32 at least and rounded once."""
    ranks, mine = group_size(group), [sizes[rank]] * len(sizes)

    def gather(rows: Tensor) -> Pending:
        copies = rows.expand(ranks, *rows.shape).flatten(0, 1)
        return start_all_to_all_rows(copies, group, sizes, mine)

    def reduce(rows: Tensor) -> PendingRowSum:
        return PendingRowSum(start_all_to_all_rows(rows, group, mine, sizes), ranks)

    return Route(gather, reduce)


class PendingRowSum:
    """Addends under way, end to end; `wait` gives their sum."""

    def __init__(self, addends: Pending, count: int) -> None:
        self._addends, self._count = addends, count

    @property
    def tensor(self) -> Tensor:
        return self._addends.tensor

    def wait(self) -> Tensor:
        addends = self._addends.wait()
        wide = torch.promote_types(addends.dtype, torch.float32)
        shape = (self._count, addends.shape[0] // self._count, *addends.shape[1:])
        return addends.view(shape).sum(0, dtype=wide).to(addends.dtype)


# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class _UnderWay:
    route: Route
    turn: CooperativeTurn | None
    wanted: list[bool] = field(default_factory=list)
    """Which tensors' gradients come back."""
    pending: list[Pending | PendingRowSum] = field(default_factory=list)
    returning: list[Pending | PendingRowSum | None] = field(default_factory=list)

    def yield_turn(self) -> None:
        """Let another micro-batch compute until the rows are there."""
        if self.turn is not None:
            self.turn.yield_turn()


class AsyncCollective:
    """Rows under way. `finish` waits for them; call it once."""

    def __init__(self, route: Route, turn: CooperativeTurn | None, *rows: Tensor) -> None:
        self._way = _UnderWay(route, turn)
        self._rows = _Start.apply(self._way, *rows)

    def finish(self) -> tuple[Tensor, ...]:
        """What came, for each tensor that went. Another micro-batch may compute meanwhile (`turn`)."""
        rows, self._rows = self._rows, ()  # whose memory goes when the caller is done with it
        return _Finish.apply(self._way, *rows)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _UnderWay, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.way = way
        way.wanted = [tensor.requires_grad for tensor in rows]
        way.pending = [way.route.go(tensor) for tensor in rows]
        return tuple(pending.tensor for pending in way.pending)  # whose numbers are still to come

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *unused: Tensor) -> tuple[Tensor | None, ...]:
        ctx.way.yield_turn()
        returning, ctx.way.returning = ctx.way.returning, []
        return None, *(None if pending is None else pending.wait() for pending in returning)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _UnderWay, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.way, ctx.shapes = way, [tensor.shape for tensor in rows]
        way.yield_turn()
        pending, way.pending = way.pending, []
        return tuple(one.wait() for one in pending)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        way = ctx.way
        way.returning = [
            way.route.come_back(gradient.contiguous()) if wanted else None
            for gradient, wanted in zip(gradients, way.wanted, strict=True)
        ]
        # The other node knows where the gradients are; what autograd hands it in their place has no memory.
        return None, *(g.new_zeros(()).expand(shape) for g, shape in zip(gradients, ctx.shapes, strict=True))
