"""Token dispatchers: they send tokens to their experts (dispatch) and return the experts' results (combine).

Experts are distributed over an expert parallel group (`ep`), whole or, with expert tensor parallelism (`expt_tp`), by
channels. Every rank has its own tokens. All ranks that hold channels of an expert receive a copy of its tokens, and
their results are summed.

A dispatcher plans an exchange for each micro-batch. `start_dispatch` starts it, and `finish_dispatch` returns the rows
of this rank's experts. `start_combine` starts to send the results back, and `finish_combine` returns one sum per token.
Computation between a start and its finish hides the exchange, in forward and in backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.backends import Backend, choose_backend
from megatron.core.collectives import HostCopy, gather_rows, group_rank, group_size
from megatron.core.distributed.expert_placement import ExpertPositions
from megatron.core.exceptions import UserError
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.ops.moe.permute import Copies
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.async_collective import (
    AsyncCollective,
    Route,
    all_to_all_route,
    gather_route,
    uneven_gather_route,
)
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.recompute_cache import run_once_under_recompute

Positions = Callable[[], ExpertPositions]
"""Returns where the experts are, once it is called; the host may wait for counts."""


@dataclass(frozen=True)
class ExpertRows:
    """Input of a rank's experts: rows sorted by expert, within an expert by source rank and then by token."""

    rows: Tensor
    """[n, h]"""
    weights: Tensor
    """[n]: the router's weight of each row, float32 at least."""
    groups: RowGroups
    """Number of rows of each expert."""


class DispatchCombine(ABC):
    """The dispatch and combine of one micro-batch."""

    def __init__(self, at: "TokenDispatcher", routing: Routing, turn: CooperativeTurn | None) -> None:
        self.at, self.routing, self.turn = at, routing, turn
        self._exchange: AsyncCollective | None = None

    @abstractmethod
    def start_dispatch(self, hidden: Tensor) -> None:
        """Starts to send the tokens [t, h]."""

    @abstractmethod
    def finish_dispatch(self) -> ExpertRows:
        """Waits, and returns the rows of this rank's experts."""

    def own_rows(self) -> ExpertRows | None:
        """Returns the rows of this rank's own tokens for its own experts if `finish_dispatch` leaves them out,
        otherwise None. Call it between start and finish of the dispatch."""
        return None

    def add_own_results(self, results: Tensor) -> None:
        """Takes the experts' results for `own_rows`, [n, h]. Call it between start and finish of the combine."""
        raise NotImplementedError

    @abstractmethod
    def start_combine(self, results: Tensor) -> None:
        """Starts to return the experts' results, [n, h]."""

    @abstractmethod
    def finish_combine(self) -> Tensor:
        """Waits, and returns the sum of the results of each token's experts, [t, h]."""


class TokenDispatcher(ABC):
    """Base class of dispatchers: knows which ranks hold which experts. Raises UserError if the experts cannot be
    divided among them."""

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection, backend: Backend | None = None
    ) -> None:
        assert config.num_moe_experts is not None
        self.num_experts = config.num_moe_experts
        self.ep_group, self.etp_group = pg_collection.ep, pg_collection.expt_tp
        self.ep_size, self.etp_size = group_size(self.ep_group), group_size(self.etp_group)
        if self.num_experts % self.ep_size:
            raise UserError(
                f"num_moe_experts {self.num_experts} is not divisible by {self.ep_size} expert parallel ranks"
            )
        self.num_local_experts = self.num_experts // self.ep_size
        self.ep_rank, self.etp_rank = group_rank(self.ep_group), group_rank(self.etp_group)
        self.backend = backend or choose_backend(config)
        self.copies_sizes = True
        """Whether the host always gets the number of rows of each expert. If not, it gets them only where the sizes of
        exchanges need them."""

    def leave_sizes_on_device(self) -> None:
        """The experts of this layer do not read the number of their rows on the host."""
        self.copies_sizes = False

    @abstractmethod
    def plan(
        self, routing: Routing, turn: CooperativeTurn | None = None, positions: Positions = ExpertPositions
    ) -> DispatchCombine:
        """Returns the exchange for a routing to experts that are at `positions` (default: at home)."""

    def of_all_ranks(self, rows: Tensor) -> Tensor:
        """Gathers rows [n, ...] of all ranks that share the experts: [etp * ep * n, ...], by etp rank, then by ep
        rank."""
        return gather_rows(gather_rows(rows, self.ep_group), self.etp_group)

    def weights_of(self, routing: Routing, copies: Copies, choice: Tensor) -> Tensor:
        """Returns the router's weight of each copy, [n]."""
        flat = Copies(choice, copies.places.view(-1, 1))
        return self.backend.permute(routing.weights.reshape(-1, 1), flat)[:, 0]


class MoEAlltoAllTokenDispatcher(TokenDispatcher):
    """Sends each copy of a token to the ranks that hold its expert. Row counts are computed on the device; one small
    copy per layer brings them to the host."""

    def plan(
        self, routing: Routing, turn: CooperativeTurn | None = None, positions: Positions = ExpertPositions
    ) -> DispatchCombine:
        """Returns the exchange for a routing to experts that are at `positions`."""
        return _CopyDispatchCombine(self, routing.placed(positions()), turn)


class AlltoAllDispatchCombine(DispatchCombine):
    """An exchange that sends rows to their expert parallel rank, and then to all ranks that hold channels of its
    experts. Results return the same way."""

    copies: Copies
    """The copies of this rank's tokens that are sent."""
    to_experts: Route
    to_channels: Route
    order: Copies | None = None
    """The order of received rows in which experts compute; None: as received."""

    def start_combine(self, results: Tensor) -> None:
        """Starts to return the experts' results, [n, h]."""
        at = self.at
        if self.order is not None:
            results = at.backend.unpermute(results, self.order)
        if at.etp_size > 1:
            (results,) = AsyncCollective(self.to_channels.reversed(), self.turn, results).finish()
        self.rows = results
        if at.ep_size > 1:
            self._exchange = AsyncCollective(self.to_experts.reversed(), self.turn, results)

    def finish_combine(self) -> Tensor:
        """Waits, and returns the sum of the results of each token's experts, [t, h]."""
        rows = self.rows
        del self.rows
        if self._exchange is not None:
            (rows,) = self._exchange.finish()
        return self.at.backend.unpermute(rows, self.copies)


class _CopyDispatchCombine(AlltoAllDispatchCombine):
    def __init__(self, at: MoEAlltoAllTokenDispatcher, routing: Routing, turn: CooperativeTurn | None) -> None:
        super().__init__(at, routing, turn)
        self.counts = run_once_under_recompute((at, "token counts"), self._all_counts)
        """Number of rows from (etp rank, ep rank) for each expert of an ep rank."""
        self.knows_sizes = at.copies_sizes or at.ep_size * at.etp_size > 1 or routing.kept is not None
        self._on_host: HostCopy | None = None
        if routing.of_ranks is not None:
            self._on_host = HostCopy(routing.of_ranks[1].view(self.counts.shape))
        elif self.knows_sizes:
            self._on_host = run_once_under_recompute((at, "counts on the host"), lambda: HostCopy(self.counts))

    def _all_counts(self) -> Tensor:
        at, routing = self.at, self.routing
        if routing.of_ranks is not None:
            by_rank = routing.of_ranks[0]
        else:
            by_rank = at.of_all_ranks(routing.tokens_per_expert(at.num_experts)[None])  # [etp * ep, experts]
        return by_rank.view(at.etp_size, at.ep_size, at.ep_size, at.num_local_experts)

    def start_dispatch(self, hidden: Tensor) -> None:
        at, routing = self.at, self.routing
        count = routing.experts.numel()
        if routing.kept is not None:
            count = int(self._sizes()[at.etp_rank, at.ep_rank].sum())
        self.copies, choice = at.backend.copies_by_group(routing.experts, routing.kept, count, at.num_experts)
        self.rows = at.backend.permute(hidden, self.copies)
        self.weights = at.weights_of(routing, self.copies, choice)
        if at.ep_size > 1:
            sizes = self._sizes()[at.etp_rank].sum(-1)  # [from, to]
            self.to_experts = all_to_all_route(at.ep_group, sizes[at.ep_rank].tolist(), sizes[:, at.ep_rank].tolist())
            self._exchange = AsyncCollective(self.to_experts, self.turn, self.rows, self.weights)

    def finish_dispatch(self) -> ExpertRows:
        at = self.at
        counts = self.counts[:, :, at.ep_rank]  # [etp, ep, local experts]
        rows, weights = self.rows, self.weights
        del self.rows, self.weights
        if self._exchange is not None:
            rows, weights = self._exchange.finish()
        if at.etp_size > 1:
            parts = self._sizes()[:, :, at.ep_rank].sum((1, 2)).tolist()
            self.to_channels = uneven_gather_route(at.etp_group, parts, at.etp_rank)
            rows, weights = AsyncCollective(self.to_channels, self.turn, rows, weights).finish()
        if at.num_local_experts > 1 and at.ep_size * at.etp_size > 1:
            by_source = RowGroups(counts.flatten()).of_rows(rows.shape[0])
            experts = (by_source % at.num_local_experts)[:, None]
            self.order, _ = at.backend.copies_by_group(experts, None, rows.shape[0], at.num_local_experts)
            rows = at.backend.permute(rows, self.order)
            weights = at.backend.permute(weights[:, None], self.order)[:, 0]
        sizes = self._sizes()[:, :, at.ep_rank].sum((0, 1)).tolist() if self.knows_sizes else None
        return ExpertRows(rows, weights, RowGroups.of_sources(counts, sizes))

    def _sizes(self) -> Tensor:
        """Returns `counts` on the host."""
        assert self._on_host is not None
        return self._on_host.wait()


class MoEAllGatherTokenDispatcher(TokenDispatcher):
    """Gathers all tokens of the ranks that share experts. Each rank selects the tokens of its own experts, and results
    are summed over the ranks. All ranks must have the same number of tokens."""

    def plan(
        self, routing: Routing, turn: CooperativeTurn | None = None, positions: Positions = ExpertPositions
    ) -> DispatchCombine:
        """Returns the exchange for a routing to experts that are at `positions`."""
        return _AllGatherDispatchCombine(self, routing, turn, positions)


class _AllGatherDispatchCombine(DispatchCombine):
    def __init__(
        self,
        at: MoEAllGatherTokenDispatcher,
        routing: Routing,
        turn: CooperativeTurn | None,
        positions: Positions,
    ) -> None:
        super().__init__(at, routing, turn)
        self.positions = positions
        self.numbers = run_once_under_recompute(
            (at, "experts of all ranks"), lambda: at.of_all_ranks(routing.experts_with_room().to(torch.int32))
        )
        """int32 [all tokens, k]: the experts that tokens go to; -1: an expert has no room."""
        self.all_are_here = at.ep_size == 1 and routing.kept is None
        self._on_host: HostCopy | None = None

    def start_dispatch(self, hidden: Tensor) -> None:
        at, self.rows, self.weights = self.at, hidden, self.routing.weights
        if at.ep_size > 1:
            self._exchange = AsyncCollective(gather_route(at.ep_group), self.turn, self.rows, self.weights)
        # The device orders the rows while they are gathered, and while the host waits for their number.
        positions = self.positions()
        if positions.slot is not None:
            self.experts = positions.slot[self.numbers]  # -1 is the last entry
            self.here = self.experts >= 0
        else:
            self.experts = self.numbers.to(torch.int64) - at.ep_rank * at.num_local_experts
            self.here = (self.experts >= 0) & (self.experts < at.num_local_experts)
        self.counts = self._count(positions.of_ranks)
        here = None if self.all_are_here else self.here
        self._order = at.backend.copies_by_group(self.experts, here, self.experts.numel(), at.num_local_experts)

    def _count(self, of_ranks: tuple[Tensor, Tensor] | None) -> Tensor:
        """Returns the rows of each expert of this rank, and starts to copy them to the host if they are needed and not
        known there."""
        at = self.at
        if of_ranks is not None:
            own = slice(at.ep_rank * at.num_local_experts, (at.ep_rank + 1) * at.num_local_experts)
            self._on_host = HostCopy(of_ranks[1][:, own].sum(0))
            return of_ranks[0][:, own].sum(0)
        local = self.experts.clamp(0, at.num_local_experts - 1)
        counts = at.backend.count_experts(local, at.num_local_experts, self.here)
        if at.copies_sizes or not self.all_are_here:
            self._on_host = run_once_under_recompute((at, "counts on the host"), lambda: HostCopy(counts))
        return counts

    def finish_dispatch(self) -> ExpertRows:
        at = self.at
        if self._exchange is not None:
            self._exchange.yield_turn()
        count = self.experts.numel() if self.all_are_here else sum(self._sizes() or ())
        self.copies, choice = first_rows(*self._order, count)
        del self._order
        # Only products in fp8 distinguish the rows' sources.
        has_sources = at.backend.fp8 is not None and at.ep_size * at.etp_size > 1
        by_source = self._counts_by_source() if has_sources else None
        hidden, weights = self.rows, self.weights
        del self.rows, self.weights
        if self._exchange is not None:
            hidden, weights = self._exchange.finish()
        if at.etp_size > 1:
            hidden, weights = AsyncCollective(gather_route(at.etp_group), self.turn, hidden, weights).finish()
        rows = at.backend.permute(hidden, self.copies)
        weights = at.weights_of(Routing(self.experts, weights), self.copies, choice)
        return ExpertRows(rows, weights, RowGroups(self.counts, self._sizes(), by_source))

    def _counts_by_source(self) -> Tensor:
        """Returns the number of rows of each local expert from each rank, int64 [local experts, ranks]."""
        at = self.at
        ranks, local = at.ep_size * at.etp_size, at.num_local_experts
        first = torch.arange(0, ranks * local, local, device=self.experts.device)[:, None, None]
        numbers = self.experts.clamp(0, local - 1).view(ranks, -1, self.experts.shape[1]) + first
        counts = at.backend.count_experts(numbers.flatten(0, 1), ranks * local, self.here)
        return counts.view(ranks, local).t()

    def _sizes(self) -> list[int] | None:
        """Returns `counts` on the host; None if they are not needed there."""
        return None if self._on_host is None else self._on_host.wait().tolist()

    def start_combine(self, results: Tensor) -> None:
        at = self.at
        self.rows = at.backend.unpermute(results, self.copies)
        if at.etp_size > 1:
            (self.rows,) = AsyncCollective(gather_route(at.etp_group).reversed(), self.turn, self.rows).finish()
        if at.ep_size > 1:
            self._exchange = AsyncCollective(gather_route(at.ep_group).reversed(), self.turn, self.rows)

    def finish_combine(self) -> Tensor:
        return self.rows if self._exchange is None else self._exchange.finish()[0]


def first_rows(copies: Copies, choice: Tensor, count: int) -> tuple[Copies, Tensor]:
    """Returns the first `count` rows of copies and their choices."""
    return Copies(copies.source[:count], copies.places), choice[:count]
