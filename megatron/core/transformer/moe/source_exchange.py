"""An exchange that lets the experts of a rank compute the tokens of one source rank after the other.

All ranks that share experts get all tokens of each other, and every rank returns to every other rank one sum per token.
The rows of a rank's own tokens are there at once, so the first product of the experts begins with them while the tokens
of other ranks arrive. The last product ends with them while sums return to the other ranks:

    first product:   own | rank 1 | rank 2 ...    a rank's tokens are copied into their rows before its part
    last product:    rank 1 | rank 2 ... | own    a rank's sums are sent after its part

So neither the exchange nor a rank that is late delays the experts, as long as a part takes longer. Backward computes
the rows of all ranks at once. There, deferred weight gradients hide the exchange (`delay_wgrad_compute`).

A link moves the data: over a process group on any device, or by copy engines between the GPUs of a host.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron.core.backends import Backend
from megatron.core.communication.collectives import (
    Group,
    Pending,
    group_rank,
    group_size,
    start_all_to_all_rows,
    start_gather_rows,
)
from megatron.core.communication.peer_memory import WITHOUT_SHARED_MEMORY
from megatron.core.communication.traffic import record_traffic
from megatron.core.distributed.expert_placement import Placement
from megatron.core.exceptions import UserError
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.ops.moe.grouped_linear import ArrivingRows, Bounds, PartSteps
from megatron.core.transformer.moe.peer_all_to_all import RowRing, ring_of, uses_peers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.warn import warn_on_first_rank


class Gathering(Protocol):
    """The tokens of all ranks on their way to this rank."""

    def tokens_of(self, source: int) -> Tensor:
        """Returns the tokens of another rank, [t, h]. Later kernels of the current stream wait for them."""

    def close(self) -> None:
        """Frees the tokens when the current stream has read them."""


class Returning(Protocol):
    """Sums on their way to the ranks of their tokens."""

    def send(self, to: int, sums: Tensor) -> None:
        """Starts to send the sums of another rank's tokens, [t, h]. Call it once for each other rank."""

    def received(self) -> Tensor:
        """Returns the sums of this rank's tokens from the other ranks, [ranks - 1, t, h]. Later kernels of the current
        stream wait for them."""

    def close(self) -> None:
        """Frees the sums when the current stream has read them."""


class Link(Protocol):
    """A way to exchange rows between the ranks of a group."""

    def gather(self, tokens: Tensor) -> Gathering:
        """Starts to send this rank's tokens [t, h] to all other ranks, which have equally many."""

    def returns(self, like: Tensor) -> Returning:
        """Starts an exchange of sums, each of the shape and type of `like`."""


# ---------------------------------------------------------------------------------------------------------------------
# Over a process group


class GroupLink:
    """A link by collectives."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def gather(self, tokens: Tensor) -> "_GroupGathering":
        """Starts to send this rank's tokens [t, h] to all other ranks."""
        return _GroupGathering(start_gather_rows(tokens, self.group), tokens.shape)

    def returns(self, like: Tensor) -> "_GroupReturning":
        """Starts an exchange of sums."""
        return _GroupReturning(self.group, like.shape)


class _GroupGathering:
    def __init__(self, pending: Pending, shape: Sequence[int]) -> None:
        self._pending, self._shape = pending, shape

    def tokens_of(self, source: int) -> Tensor:
        return self._pending.wait().view(-1, *self._shape)[source]

    def close(self) -> None:
        del self._pending


class _GroupReturning:
    """One all-to-all, which starts when the sums for all ranks are there."""

    def __init__(self, group: Group, shape: Sequence[int]) -> None:
        self._group, self._shape, self._sums = group, shape, dict[int, Tensor]()

    def send(self, to: int, sums: Tensor) -> None:
        self._sums[to] = sums
        ranks, rank = group_size(self._group), group_rank(self._group)
        if len(self._sums) == ranks - 1:
            ordered = [self._sums[to] for to in sorted(self._sums)]
            sizes = [0 if other == rank else self._shape[0] for other in range(ranks)]
            self._pending = start_all_to_all_rows(torch.cat(ordered), self._group, sizes, sizes)
            self._sums.clear()

    def received(self) -> Tensor:
        return self._pending.wait().view(-1, *self._shape)

    def close(self) -> None:
        del self._pending


# ---------------------------------------------------------------------------------------------------------------------
# Between the GPUs of a host


class PeerLink:
    """A link by copy engines, which need no multiprocessor of a GPU and so do not slow its products."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def ring(self, rows: Tensor) -> RowRing:
        """Returns the memory for such rows. Raises UserError if the GPUs cannot access each other's memory."""
        return ring_of(rows, self.group, rows.shape[0])

    def gather(self, tokens: Tensor) -> "_PeerGathering":
        """Starts to send this rank's tokens [t, h] to all other ranks."""
        return _PeerGathering(self.ring(tokens), tokens)

    def returns(self, like: Tensor) -> "_PeerReturning":
        """Starts an exchange of sums."""
        return _PeerReturning(self.ring(like), like)


class _PeerGathering:
    def __init__(self, ring: RowRing, tokens: Tensor) -> None:
        self._place, self._like = ring.open(), tokens
        for to in ring.others:
            record_traffic("all_to_all", tokens, lambda: ring.global_ranks, kept_rows=0)
            self._place.send(to, tokens)

    def tokens_of(self, source: int) -> Tensor:
        self._place.wait(source)
        return self._place.rows_of(source, self._like.shape[0], self._like.dtype)

    def close(self) -> None:
        self._place.close()


class _PeerReturning:
    def __init__(self, ring: RowRing, like: Tensor) -> None:
        self._ring, self._place, self._dtype = ring, ring.open(), like.dtype

    def send(self, to: int, sums: Tensor) -> None:
        record_traffic("all_to_all", sums, lambda: self._ring.global_ranks, kept_rows=0)
        self._place.send(to, sums)

    def received(self) -> Tensor:
        for source in self._ring.others:
            self._place.wait(source)
        return self._place.rows_of_all(self._dtype)

    def close(self) -> None:
        self._place.close()


# ---------------------------------------------------------------------------------------------------------------------
# The one that fits


class FittingLink:
    """A link by copy engines between GPUs that share memory, otherwise by collectives."""

    def __init__(self, group: Group) -> None:
        self.peers, self.collectives = PeerLink(group), GroupLink(group)

    def of(self, rows: Tensor) -> Link:
        """Returns the link for such rows."""
        group = self.peers.group
        assert isinstance(group, ProcessGroup)
        if not rows.is_cuda or group in WITHOUT_SHARED_MEMORY:
            return self.collectives
        try:
            self.peers.ring(rows)
        except UserError as error:
            warn_on_first_rank(f"--moe-local-token-overlap sends tokens by collectives, which may be slower. {error}")
            WITHOUT_SHARED_MEMORY.add(group)
            return self.collectives
        return self.peers

    def gather(self, tokens: Tensor) -> Gathering:
        """Starts to send this rank's tokens [t, h] to all other ranks."""
        return self.of(tokens).gather(tokens)

    def returns(self, like: Tensor) -> Returning:
        """Starts an exchange of sums."""
        return self.of(like).returns(like)


def link_of(group: Group, config: TransformerConfig) -> Link:
    """Returns the link for `moe_dispatcher_transport`. Raises UserError if that needs a GPU, and there is none."""
    if uses_peers(config):
        return PeerLink(group)
    return FittingLink(group) if config.moe_dispatcher_transport is None else GroupLink(group)


# ---------------------------------------------------------------------------------------------------------------------


class SourceExchange:
    """The dispatch and combine of one micro-batch, with the gradients of both.

    `start_dispatch` sends tokens and `start_rows` begins to copy own ones. `arriving` returns rows that arrive while
    experts compute; `rows` waits for all. The steps of `leaving` send sums, `start_combine` takes the experts' results,
    and `finish_combine` returns this rank's sums.
    """

    def __init__(self, link: Link, ranks: int, rank: int, backend: Backend, turn: CooperativeTurn | None) -> None:
        self.link, self.rank, self.backend, self.turn = link, rank, backend, turn
        self.others = [(rank + distance) % ranks for distance in range(1, ranks)]
        """The other ranks in the order in which their tokens arrive and their sums leave."""
        self.places: Sequence[Tensor] = ()
        """For each rank the rows of its tokens, int64 [t, k]; -1: no row."""
        self.count = 0
        """Number of rows."""
        self.gathering: Gathering | None = None
        self.returning: Returning | None = None
        self.own: Tensor | None = None
        """The tokens of this rank that are being gathered, or the rows whose sums for this rank are still due."""
        self._room: Tensor | None = None
        """Rows with own tokens, whose number is not known yet."""

    def yield_turn(self) -> None:
        """Lets another micro-batch, or deferred work, compute until rows have arrived."""
        if self.turn is not None:
            self.turn.yield_turn()

    def start_dispatch(self, tokens: Tensor) -> None:
        """Starts to send this rank's tokens [t, h]."""
        self._in_flight = _StartDispatch.apply(self, tokens)

    def start_rows(self, places: Tensor, room: int) -> None:
        """Starts to copy own tokens into rows, given the rows of all tokens, int64 [ranks * t, k]. `room` is the number
        of rows to make room for; the number that is needed may be larger."""
        self.places = places.chunk(1 + len(self.others))
        self._room = self._with_own(room)

    def rows(self, count: int) -> Tensor:
        """Returns all rows, [n, h], given their number."""
        self.count = count
        rows: Tensor = _Rows.apply(self, self._in_flight)
        return rows

    def arriving(
        self, bounds: Bounds, count: Callable[[], int], swaps: Placement, late: Callable[[], bool]
    ) -> tuple[Tensor, ArrivingRows]:
        """Returns the placeholder of the rows, and the rows as they arrive, given where those of each rank are.

        `count` returns their number and may wait. If `late` does, the rows of swapped experts are one more part of the
        bounds, which comes last; `swaps` brings the weights of these experts meanwhile.
        """

        def settle() -> tuple[int, list[int]]:
            self.count = count()
            return self.count, [*self.others, *([1 + len(self.others)] if late() else [])]

        def before(part: int, rows: Tensor) -> None:
            if part == self.others[0]:
                swaps.start_swap()  # behind the own rows, which the host launches first
            if part <= len(self.others):
                self.put(part, rows)
            else:
                swaps.finish_swap()

        def give_back(gradient: Tensor) -> Tensor:
            self.send_all(gradient)
            return gradient.new_zeros(1)

        room, self._room = self._room, None
        assert room is not None
        return self._in_flight, ArrivingRows(room, self.rank, bounds, settle, self._with_own, before, give_back)

    def _with_own(self, room: int) -> Tensor:
        """Returns memory for rows, with the values of own tokens."""
        assert self.own is not None
        rows = self.own.new_empty(room, self.own.shape[1])
        self.backend.experts.put_tokens(rows, self.own, self.places[self.rank])
        return rows

    def take_room(self) -> Tensor:
        """Returns the rows [n, h], with those of own tokens."""
        room, self._room = self._room, None
        assert room is not None
        # No view for autograd, which forbids writes into views.
        return (room if self.count <= room.shape[0] else self._with_own(self.count))[: self.count].data

    def leaving(self, bounds: Bounds) -> PartSteps:
        """Returns the steps of the last product, which send sums to other ranks."""
        return PartSteps([*self.others, self.rank], bounds, self.send)

    def start_combine(self, results: Tensor, in_steps: bool) -> None:
        """Takes the results [n, h] of all rows. Without `in_steps` starts to send the sums of other ranks."""
        self._in_flight = _StartCombine.apply(self, results, in_steps)

    def finish_combine(self) -> Tensor:
        """Returns the sum of the results of each own token, [t, h]."""
        total: Tensor = _FinishCombine.apply(self, self._in_flight)
        del self._in_flight
        return total

    # What forward of one exchange and backward of the other have in common

    def gather(self, tokens: Tensor) -> None:
        """Starts to gather tokens."""
        self.own, self.gathering = tokens, self.link.gather(tokens)

    def put(self, source: int, rows: Tensor) -> None:
        """Copies the tokens of a rank into their rows, as soon as they are there. The last rank ends the gathering."""
        assert self.own is not None and self.gathering is not None
        tokens = self.own if source == self.rank else self.gathering.tokens_of(source)
        self.backend.experts.put_tokens(rows, tokens, self.places[source])
        if source == self.others[-1]:
            self.gathering.close()
            self.own = self.gathering = None

    def put_all(self, rows: Tensor) -> None:
        """Copies all tokens into their rows."""
        for source in (self.rank, *self.others):
            self.put(source, rows)

    def send(self, source: int, rows: Tensor) -> None:
        """Starts to return the sums of a rank's rows; keeps the rows for those of this rank, which come last."""
        if source == self.rank:
            self.own = rows.detach()
            return
        sums = self.backend.experts.sum_rows_and_addends(rows, self.places[source])
        if self.returning is None:
            self.returning = self.link.returns(sums)
        self.returning.send(source, sums)

    def send_all(self, rows: Tensor) -> None:
        """Starts to return all sums."""
        for source in (*self.others, self.rank):
            self.send(source, rows)

    def total(self) -> Tensor:
        """Returns the sums of this rank's tokens over the rows of all ranks, [t, h], rounded once after the sums of
        each rank are."""
        assert self.own is not None and self.returning is not None
        total = self.backend.experts.sum_rows_and_addends(self.own, self.places[self.rank], self.returning.received())
        self.returning.close()
        self.own = self.returning = None
        return total


# Between start and finish of an exchange autograd has a placeholder: the data is in the exchange.


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: SourceExchange, tokens: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.gather(tokens.detach().contiguous())
        return tokens.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, unused: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.yield_turn()
        return None, ctx.exchange.total()


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: SourceExchange, in_flight: Tensor) -> Tensor:
        ctx.exchange = exchange
        rows = exchange.take_room()
        for source in exchange.others:
            exchange.put(source, rows)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.send_all(gradient.contiguous())
        return None, gradient.new_zeros(1)


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: SourceExchange, results: Tensor, in_steps: bool) -> Tensor:
        ctx.exchange, ctx.width = exchange, results.shape[1]
        if not in_steps:
            exchange.send_all(results.detach())
        return results.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, unused: Tensor) -> tuple[None, Tensor, None]:
        ctx.exchange.yield_turn()
        rows = unused.new_empty(ctx.exchange.count, ctx.width)
        ctx.exchange.put_all(rows)
        return None, rows, None


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: SourceExchange, in_flight: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.total()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.gather(gradient.contiguous())
        return None, gradient.new_zeros(1)
