"""A dispatcher that sends each token at most once to each rank, even if the rank holds several of the token's experts.

With k experts per token on R ranks, an all-to-all of copies sends k rows per token. This dispatcher sends one row for
each rank that holds any of the experts: R (1 - (1 - 1/R)^k) rows if routing is even, 3.6 instead of 8 for k = 8 and R =
4. The expert indices and weights of a row are sent with it. The receiving rank makes the copies for its experts and
sums their results. So a sum over experts is rounded once on each receiving rank and once more on the sending rank.
"""

import torch
from torch import Tensor

from megatron.core.communication.async_collective import AsyncCollective, all_to_all_route, uneven_gather_route
from megatron.core.communication.collectives import HostCopy
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.transformer.moe.alltoall_dispatcher import AlltoAllDispatchCombine, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.moe.dispatch import DispatchCombine, ExpertRows, first_rows
from megatron.core.transformer.moe.routing import Routing
from megatron.core.utils.recompute_cache import run_once_under_recompute


class MoEFlexTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends a token once to each rank that holds any of its experts. One small copy per layer brings the row counts to
    the host."""

    def plan(self, routing: Routing, turn: CooperativeTurn | None = None) -> DispatchCombine:
        """Returns the exchange for a routing."""
        if self.ep_size * self.etp_size == 1:
            return super().plan(routing, turn)
        return _TokenDispatchCombine(self, routing, turn)


class _TokenDispatchCombine(AlltoAllDispatchCombine):
    at: MoEFlexTokenDispatcher

    def __init__(self, at: MoEFlexTokenDispatcher, routing: Routing, turn: CooperativeTurn | None) -> None:
        super().__init__(at, routing, turn)
        taken = routing.taken()
        by_rank = taken.new_zeros(taken.shape[0], at.ep_size)
        self.wanted = by_rank.scatter_add_(1, routing.experts // at.num_local_experts, taken) > 0
        """bool [t, ep]: True for ranks that a token is sent to."""
        counts = run_once_under_recompute((at, "token counts"), self._all_counts)  # [etp, ep, experts + ep]
        shape = (at.etp_size, at.ep_size, at.ep_size, at.num_local_experts)
        self.copy_counts = counts[..., : at.num_experts].reshape(shape)
        """Number of copies from (etp rank, ep rank) for each expert of an ep rank."""
        self._sizes = run_once_under_recompute((at, "counts on the host"), lambda: HostCopy(counts)).wait
        # The device orders the rows while the host waits for their counts.
        ranks = torch.where(self.wanted, torch.arange(at.ep_size, device=taken.device), -1)  # [t, ep]
        self._sent = at.backend.experts.number_choices(ranks, at.ep_size).copies(ranks.numel())

    def _all_counts(self) -> Tensor:
        at = self.at
        counts = torch.cat([self.routing.tokens_per_expert(at.num_experts), self.wanted.sum(0)])[None]
        return at.of_all_ranks(counts).view(at.etp_size, at.ep_size, -1)

    def _copies_here(self) -> Tensor:
        """Returns the number of copies from (etp rank, ep rank) for each expert of this rank, on the host: [etp, ep,
        local experts]."""
        at = self.at
        return self._sizes()[..., at.ep_rank * at.num_local_experts : (at.ep_rank + 1) * at.num_local_experts]

    def start_dispatch(self, hidden: Tensor) -> None:
        at, routing = self.at, self.routing
        sizes = self._sizes()[at.etp_rank, :, at.num_experts :]  # [from, to]
        self.copies, choice = first_rows(*self._sent, int(sizes[at.ep_rank].sum()))
        self.rows = at.backend.experts.permute(hidden, self.copies)
        self.weights = at.backend.experts.permute(routing.weights, self.copies)  # [n, k]
        if at.ep_size > 1:
            self.to_experts = all_to_all_route(at.ep_group, sizes[at.ep_rank].tolist(), sizes[:, at.ep_rank].tolist())
            self._exchange = AsyncCollective(self.to_experts, self.turn, self.rows, self.weights)
        first = choice % at.ep_size * at.num_local_experts  # expert of the rank that a row goes to
        local = routing.experts_with_room().index_select(0, self.copies.source) - first[:, None]
        local = torch.where((local >= 0) & (local < at.num_local_experts), local, -1)
        self.numbers = local.to(torch.int32)
        """[n, k]: local indices of the experts of a row on the receiving rank; -1: no further expert."""
        if at.ep_size > 1:
            self._numbers = self.to_experts.go(self.numbers)

    def finish_dispatch(self) -> ExpertRows:
        at = self.at
        rows, weights, numbers = self.rows, self.weights, self.numbers
        del self.rows, self.weights, self.numbers
        if self._exchange is not None:
            rows, weights = self._exchange.finish()
            numbers = self._numbers.wait()
            del self._numbers
        if at.etp_size > 1:
            parts = self._sizes()[:, :, at.num_experts + at.ep_rank].sum(1).tolist()
            self.to_channels = uneven_gather_route(at.etp_group, parts, at.etp_rank)
            numbers = self.to_channels.go(numbers).wait()
            rows, weights = AsyncCollective(self.to_channels, self.turn, rows, weights).finish()
        counts, sizes = self.copy_counts[:, :, at.ep_rank], self._copies_here().sum((0, 1)).tolist()
        self.order, choice = at.backend.experts.number_choices(numbers, at.num_local_experts).copies(sum(sizes))
        copied = at.backend.experts.permute(rows, self.order)
        own_weights = at.weights_of(weights, self.order, choice)
        return ExpertRows(copied, own_weights, RowGroups.of_sources(counts, sizes))
