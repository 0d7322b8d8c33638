"""The dispatcher that sends every token to all ranks that share experts."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.backends import Backend
from megatron.core.communication.collectives import HostCopy
from megatron.core.distributed.expert_placement import AT_HOME, Placement
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.transformer.moe.async_collective import (
    AsyncCollective,
    gather_route,
)
from megatron.core.transformer.moe.dispatch import (
    DispatchCombine,
    ExpertInput,
    ExpertRows,
    SteppedRows,
    TokenDispatcher,
    first_rows,
)
from megatron.core.transformer.moe.experts import ExpertSteps
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.moe.source_exchange import Link, SourceExchange, link_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.recompute_cache import run_once_under_recompute

SPARE_ROWS = 16
"""One more row is made room for with each of this number of rows, where tokens become rows before the host knows how
many. Swapped experts leave ranks within 2% of the mean."""


class MoEAllGatherTokenDispatcher(TokenDispatcher):
    """Gathers all tokens of the ranks that share experts. Each rank selects the tokens of its own experts, and results
    are summed over the ranks. All ranks must have the same number of tokens.

    With `moe_local_token_overlap` the experts begin with a rank's own tokens and end with them (`source_exchange`).
    Raises UserError for it if ranks share the channels of experts.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection, backend: Backend | None = None
    ) -> None:
        super().__init__(config, pg_collection, backend)
        self.link: Link | None = None
        """How tokens are exchanged rank by rank; None: a rank's own tokens are like the others."""
        self.last_rows = 0
        """Number of rows of the last micro-batch."""
        if config.moe_local_token_overlap and self.ep_size > 1:
            self.refuse_shared_channels()
            self.link = link_of(self.ep_group, config)

    def rows_to_expect(self, choices: int) -> int:
        """Returns the rows to make room for, given the choices of all tokens: as many as the last micro-batch had, or
        as the even share, and some to spare."""
        expected = max(self.last_rows, choices // self.ep_size)
        return min(choices, expected + expected // SPARE_ROWS)

    def plan(
        self, routing: Routing, turn: CooperativeTurn | None = None, placement: Placement = AT_HOME
    ) -> DispatchCombine:
        """Returns the exchange for a routing to experts at the positions of `placement`."""
        if self.link is not None:
            return _SourceDispatchCombine(self, self.link, routing, turn, placement)
        return _AllGatherDispatchCombine(self, routing, turn, placement)


class _AllGatherDispatchCombine(DispatchCombine):
    def __init__(
        self,
        at: MoEAllGatherTokenDispatcher,
        routing: Routing,
        turn: CooperativeTurn | None,
        placement: Placement,
    ) -> None:
        super().__init__(at, routing, turn, placement)
        self.numbers = run_once_under_recompute(
            (at, "experts of all ranks"), lambda: at.of_all_ranks(routing.experts_with_room().to(torch.int32))
        )
        """int32 [all tokens, k]: the experts that tokens go to; -1: an expert has no room."""
        self.all_are_here = at.ep_size == 1 and routing.kept is None
        self._on_host: HostCopy | None = None
        """The number of rows of each expert of this rank, unless `positions` has it."""

    def start_dispatch(self, hidden: Tensor) -> None:
        at = self.at
        # The device numbers the copies and gathers the rows while the host waits to know where the experts are.
        numbered = at.backend.experts.number_choices(self.numbers, at.num_experts)
        self._start_gathering(hidden)
        self.positions = positions = self.placement.positions()
        if positions.on_host is None:
            first, self.groups = self._count_here(numbered.counts)
        else:
            assert positions.table is not None
            first, self.groups = positions.table.first, positions.groups()
        self._order = numbered.copies(self.numbers.numel(), first)

    def _start_gathering(self, hidden: Tensor) -> None:
        at, self.rows, self.weights = self.at, hidden, self.routing.weights
        if at.ep_size > 1:
            self._exchange = AsyncCollective(gather_route(at.ep_group), self.turn, self.rows, self.weights)

    def _count_here(self, counts: Tensor) -> tuple[Tensor | None, RowGroups]:
        """Returns the first row of the copies for each expert (-1: on another rank), and the rows of this rank's
        experts, given those of all experts. Starts to copy their number to the host if it is needed there."""
        at, own = self.at, self._own_experts()
        here = counts[own]
        if at.copies_sizes or not self.all_are_here:
            self._on_host = run_once_under_recompute((at, "counts on the host"), lambda: HostCopy(here))
        if at.ep_size == 1:
            return None, RowGroups(here)
        first = torch.full_like(counts, -1)
        first[own] = here.cumsum(0) - here
        return first, RowGroups(here)

    def finish_dispatch(self) -> ExpertInput:
        at = self.at
        if self._exchange is not None:
            self._exchange.yield_turn()
        choice = self._finish_order()
        hidden, weights = self.rows, self.weights
        del self.rows, self.weights
        if self._exchange is not None:
            hidden, weights = self._exchange.finish()
        if at.etp_size > 1:
            hidden, weights = AsyncCollective(gather_route(at.etp_group), self.turn, hidden, weights).finish()
        rows = at.backend.experts.permute(hidden, self.copies)
        weights = at.weights_of(weights, self.copies, choice)
        # Only products in fp8 distinguish the rows' sources.
        has_sources = at.backend.fp8 is not None and at.ep_size * at.etp_size > 1
        by_source = self._counts_by_source() if has_sources else None
        return ExpertRows(rows, weights, dataclasses.replace(self.groups, sizes=self._sizes(), by_source=by_source))

    def _finish_order(self) -> Tensor:
        """Sets `copies`, and returns the choice of each row. May wait for the device."""
        count = self.numbers.numel() if self.all_are_here else sum(self._sizes() or ())
        self.copies, choice = first_rows(*self._order, count)
        del self._order
        return choice

    def _sizes(self) -> Sequence[int] | None:
        """Returns the number of rows of each expert of this rank on the host; None if it is not needed there."""
        if self.positions.on_host is not None:
            return self.positions.on_host.rows
        return None if self._on_host is None else self._on_host.wait().tolist()

    def _counts_by_source(self) -> Tensor:
        """Returns the number of rows of each expert of this rank from each rank, int64 [local experts, ranks]."""
        at = self.at
        ranks, experts = at.ep_size * at.etp_size, at.num_experts
        numbers = self.numbers.view(ranks, -1, self.numbers.shape[1]).to(torch.int64)
        first = torch.arange(0, ranks * experts, experts, device=numbers.device)[:, None, None]
        by_rank = (numbers.clamp(min=0) + first).flatten(0, 1)
        counts = at.backend.experts.count_experts(by_rank, ranks * experts, self.numbers >= 0)
        return counts.view(ranks, experts)[:, self._own_experts()].t()

    def _own_experts(self) -> Tensor | slice:
        return self.positions.experts_in(self.at.ep_rank, self.at.num_local_experts)

    def start_combine(self, results: Tensor) -> None:
        at = self.at
        self.rows = at.backend.experts.unpermute(results, self.copies)
        if at.etp_size > 1:
            (self.rows,) = AsyncCollective(gather_route(at.etp_group).reversed(), self.turn, self.rows).finish()
        if at.ep_size > 1:
            self._exchange = AsyncCollective(gather_route(at.ep_group).reversed(), self.turn, self.rows)

    def finish_combine(self) -> Tensor:
        return self.rows if self._exchange is None else self._exchange.finish()[0]


class _SourceDispatchCombine(_AllGatherDispatchCombine):
    """Exchanges tokens rank by rank, so that experts can begin and end with those of this rank."""

    at: MoEAllGatherTokenDispatcher

    def __init__(
        self,
        at: MoEAllGatherTokenDispatcher,
        link: Link,
        routing: Routing,
        turn: CooperativeTurn | None,
        placement: Placement,
    ) -> None:
        super().__init__(at, routing, turn, placement)
        self.by_source = SourceExchange(link, at.ep_size, at.ep_rank, at.backend, turn)

    def _start_gathering(self, hidden: Tensor) -> None:
        # Before the tokens, so that their gradients come back after those of the tokens, which take longer.
        self._gathered_weights = AsyncCollective(gather_route(self.at.ep_group), None, self.routing.weights)
        self.by_source.start_dispatch(hidden)

    def start_dispatch(self, hidden: Tensor) -> None:
        super().start_dispatch(hidden)
        # The device copies own tokens while the host waits for the number of rows.
        self.by_source.start_rows(self._order[0].places, self.at.rows_to_expect(self.numbers.numel()))

    def finish_dispatch(self) -> ExpertInput:
        at, exchange, groups = self.at, self.by_source, self.groups
        exchange.yield_turn()
        if not at.takes_steps:
            rows = exchange.rows(self._count_rows())
            if at.copies_sizes:
                groups = dataclasses.replace(groups, sizes=self._sizes())
            if at.backend.fp8 is not None:
                groups = dataclasses.replace(groups, by_source=self._counts_by_source())
            return ExpertRows(rows, self._weights_of_rows(), groups)
        if not groups.knows_sources:
            groups = dataclasses.replace(groups, by_source=self._counts_by_source())
        table, bounds = self.positions.table, groups.bounds_by_source
        # Without the rows of swapped experts, if this micro-batch comes before their weights.
        parts = bounds if self.positions.on_host is None or table is None else tuple(table.bounds_at_home)
        placeholder, arriving = exchange.arriving(parts, self._count_rows, self.placement, self._any_late)
        return SteppedRows(placeholder, groups, ExpertSteps(arriving, exchange.leaving(bounds), self._weights_of_rows))

    def start_swap(self) -> None:
        if not self.at.takes_steps:
            super().start_swap()

    def finish_swap(self) -> None:
        if not self.at.takes_steps:
            super().finish_swap()

    def _any_late(self) -> bool:
        """Returns whether the weights of swapped experts come behind the first part of the rows. The host may wait."""
        return self.positions.on_host is not None and self.positions.on_host.any_swapped

    def _count_rows(self) -> int:
        """Returns the number of rows. The host may wait."""
        self.at.last_rows = count = sum(self._sizes() or ())
        return count

    def _weights_of_rows(self) -> Tensor:
        choice = self._finish_order()
        (weights,) = self._gathered_weights.finish()
        return self.at.weights_of(weights, self.copies, choice)

    def start_combine(self, results: Tensor) -> None:
        self.by_source.start_combine(results, self.at.takes_steps)

    def finish_combine(self) -> Tensor:
        self.by_source.yield_turn()
        return self.by_source.finish_combine()
