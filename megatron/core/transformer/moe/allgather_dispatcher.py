"""The dispatcher that sends every token to all ranks that share experts."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.communication.async_collective import AsyncCollective, gather_route
from megatron.core.communication.collectives import HostCopy
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.ops.moe.routing import count_experts
from megatron.core.transformer.moe.dispatch import DispatchCombine, ExpertRows, TokenDispatcher, first_rows
from megatron.core.transformer.moe.routing import Routing
from megatron.core.utils.recompute_cache import run_once_under_recompute


class MoEAllGatherTokenDispatcher(TokenDispatcher):
    """Gathers all tokens of the ranks that share experts. Each rank selects the tokens of its own experts, and results
    are summed over the ranks. All ranks must have the same number of tokens."""

    def plan(self, routing: Routing, turn: CooperativeTurn | None = None) -> DispatchCombine:
        """Returns the exchange for a routing."""
        return _AllGatherDispatchCombine(self, routing, turn)


class _AllGatherDispatchCombine(DispatchCombine):
    def __init__(self, at: MoEAllGatherTokenDispatcher, routing: Routing, turn: CooperativeTurn | None) -> None:
        super().__init__(at, routing, turn)
        self.numbers = run_once_under_recompute(
            (at, "experts of all ranks"), lambda: at.of_all_ranks(routing.experts_with_room().to(torch.int32))
        )
        """int32 [all tokens, k]: the experts that tokens go to; -1: an expert has no room."""
        self.all_are_here = at.ep_size == 1 and routing.kept is None
        self._on_host: HostCopy | None = None
        """The number of rows of each expert of this rank, if it is needed there."""

    def start_dispatch(self, hidden: Tensor) -> None:
        at = self.at
        numbered = at.backend.experts.number_choices(self.numbers, at.num_experts)
        self._start_gathering(hidden)
        first, self.groups = self._count_here(numbered.counts)
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

    def finish_dispatch(self) -> ExpertRows:
        at = self.at
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
        return None if self._on_host is None else self._on_host.wait().tolist()

    def _counts_by_source(self) -> Tensor:
        """Returns the number of rows of each expert of this rank from each rank, int64 [local experts, ranks]."""
        at = self.at
        ranks, experts = at.ep_size * at.etp_size, at.num_experts
        numbers = self.numbers.view(ranks, -1, self.numbers.shape[1]).to(torch.int64)
        first = torch.arange(0, ranks * experts, experts, device=numbers.device)[:, None, None]
        by_rank = (numbers.clamp(min=0) + first).flatten(0, 1)
        counts = count_experts(by_rank, ranks * experts, self.numbers >= 0)
        return counts.view(ranks, experts)[:, self._own_experts()].t()

    def _own_experts(self) -> slice:
        first = self.at.ep_rank * self.at.num_local_experts
        return slice(first, first + self.at.num_local_experts)

    def start_combine(self, results: Tensor) -> None:
        at = self.at
        self.rows = at.backend.experts.unpermute(results, self.copies)
        if at.etp_size > 1:
            (self.rows,) = AsyncCollective(gather_route(at.etp_group).reversed(), self.turn, self.rows).finish()
        if at.ep_size > 1:
            self._exchange = AsyncCollective(gather_route(at.ep_group).reversed(), self.turn, self.rows)

    def finish_combine(self) -> Tensor:
        return self.rows if self._exchange is None else self._exchange.finish()[0]
