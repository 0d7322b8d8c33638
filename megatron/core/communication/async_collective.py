"""Asynchronous exchanges of rows between ranks, with separate start and finish in forward and in backward.

Operations between start and finish in the autograd graph, such as shared experts, are computed during the exchange:
in forward because they are called there, in backward because autograd runs nodes in reverse order of their creation.
Only the two nodes of an exchange handle a tensor whose data has not arrived yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import (
    Group,
    Pending,
    group_size,
    start_all_to_all_rows,
    start_gather_rows,
    start_reduce_scatter_rows,
)
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.utils.autograd_context import AutogradContext

Start = Callable[[Tensor], Pending]


@dataclass(frozen=True)
class Route:
    """An exchange of rows in forward, and of their gradient in backward."""

    go: Start
    come_back: Start

    def reversed(self) -> "Route":
        """Returns the route of the combine, in the opposite direction."""
        return Route(self.come_back, self.go)


def all_to_all_route(group: Group, sent: Sequence[int] | None = None, received: Sequence[int] | None = None) -> Route:
    """Returns a route that sends `sent[i]` rows to rank i of the group and receives `received[i]` rows from it, both in
    group order; by default equally many."""
    return Route(
        lambda rows: start_all_to_all_rows(rows, group, received, sent),
        lambda rows: start_all_to_all_rows(rows, group, sent, received),
    )


def gather_route(group: Group) -> Route:
    """Returns a route that gathers the rows of all ranks, equally many from each; in backward it sums the gradients and
    scatters the sum."""
    return Route(lambda rows: start_gather_rows(rows, group), lambda rows: start_reduce_scatter_rows(rows, group))


def uneven_gather_route(group: Group, sizes: Sequence[int], rank: int) -> Route:
    """Returns a `gather_route` for ranks with `sizes` rows each; this rank has index `rank`. Gradients
    are summed in float32 at least and rounded once."""
    ranks, mine = group_size(group), [sizes[rank]] * len(sizes)

    def gather(rows: Tensor) -> Pending:
        copies = rows.expand(ranks, *rows.shape).flatten(0, 1)
        return start_all_to_all_rows(copies, group, sizes, mine)

    def reduce(rows: Tensor) -> Pending:
        return start_all_to_all_rows(rows, group, mine, sizes).then(partial(sum_addends, count=ranks))

    return Route(gather, reduce)


def sum_addends(addends: Tensor, count: int) -> Tensor:
    """Returns the sum of `count` addends that lie end to end: [count * n, ...] -> [n, ...]."""
    wide = torch.promote_types(addends.dtype, torch.float32)
    return addends.unflatten(0, (count, -1)).sum(0, dtype=wide).to(addends.dtype)


# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class _PendingCollective:
    """State that the start and the finish of one exchange share, in forward and in backward."""

    route: Route
    turn: CooperativeTurn | None
    """Lets deferred weight gradients run in backward until the rows have arrived."""
    wanted: list[bool] = field(default_factory=list)
    """Which tensors need a gradient from the exchange of backward."""
    pending: list[Pending] = field(default_factory=list)
    returning: list[Pending | None] = field(default_factory=list)


class AsyncCollective:
    """An exchange of rows that has started. Call `finish` once."""

    def __init__(self, route: Route, turn: CooperativeTurn | None, *rows: Tensor) -> None:
        self._exchange = _PendingCollective(route, turn)
        self._rows = _Start.apply(self._exchange, *rows)

    def finish(self) -> tuple[Tensor, ...]:
        """Waits for the exchange and returns the received tensors, one for each sent."""
        rows, self._rows = self._rows, ()  # so that they are freed when the caller is done with them
        return _Finish.apply(self._exchange, *rows)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, exchange: _PendingCollective, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        exchange.wanted = [tensor.requires_grad for tensor in rows]
        exchange.pending = [exchange.route.go(tensor) for tensor in rows]
        return tuple(pending.tensor for pending in exchange.pending)  # buffers whose data has not arrived yet

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *unused: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.exchange.turn is not None:
            ctx.exchange.turn.yield_turn()
        returning, ctx.exchange.returning = ctx.exchange.returning, []
        return None, *(None if pending is None else pending.wait() for pending in returning)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, exchange: _PendingCollective, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.shapes = exchange, [tensor.shape for tensor in rows]
        pending, exchange.pending = exchange.pending, []
        return tuple(one.wait() for one in pending)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        exchange.returning = [
            exchange.route.come_back(gradient.contiguous()) if wanted else None
            for gradient, wanted in zip(gradients, exchange.wanted, strict=True)
        ]
        # The other node has the gradients; autograd gets placeholders without memory.
        return None, *(g.new_zeros(()).expand(shape) for g, shape in zip(gradients, ctx.shapes, strict=True))
