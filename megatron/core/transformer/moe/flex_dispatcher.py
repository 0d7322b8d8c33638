"""A dispatcher that sends each token once to each rank, however many of its experts that rank holds.

With k experts a token, spread over R ranks, an all-to-all of copies moves k rows a token; this moves one for each rank
that holds any: R (1 - (1 - 1/R)^k) of them where routing is even, 3.6 instead of 8 with k = 8 and R = 4. Beside a row
go the numbers of its experts and their weights; copies for experts are made, and their results summed, where the
experts are. A sum over experts is so rounded once on each rank and once more at home.
"""

import torch
from torch import Tensor

from megatron.core.collectives import gather_rows, group_rank
from megatron.core.ops.grouped_linear import RowGroups
from megatron.core.transformer.layer_inputs import Baton
from megatron.core.transformer.moe.exchange import Exchange, all_to_all_route, uneven_gather_route
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.moe.token_dispatcher import ExpertRows, Journey, MoEAlltoAllTokenDispatcher
from megatron.core.utils.host_copy import HostCopy
from megatron.core.utils.once import once


class MoEFlexTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends a token once to each rank that holds any of its experts. How many rows go where, one small copy a layer
    brings to the host."""

    def plan(self, routing: Routing, baton: Baton | None = None) -> Journey:
        if self.ep_size * self.etp_size == 1:
            return super().plan(routing, baton)
        return _Journey(self, routing, baton)


class _Journey:
    def __init__(self, at: MoEFlexTokenDispatcher, routing: Routing, baton: Baton | None) -> None:
        self.at, self.routing, self.baton = at, routing, baton
        self.mine, self.place = group_rank(at.ep_group), group_rank(at.etp_group)
        kept = torch.ones_like(routing.experts) if routing.kept is None else routing.kept.to(torch.int64)
        chosen = kept.new_zeros(kept.shape[0], at.ep_size)
        self.wanted = chosen.scatter_add_(1, routing.experts // at.num_local_experts, kept) > 0
        """bool [t, ep]: the ranks that hold any of a token's experts."""
        counts = once(self._all_counts)  # [etp, ep, experts + ep]
        shape = (at.etp_size, at.ep_size, at.ep_size, at.num_local_experts)
        self.copy_counts = counts[..., : at.num_experts].reshape(shape)
        """Of the copies that (etp rank, ep rank) has for the experts of an ep rank."""
        on_host = once(lambda: HostCopy(counts)).wait
        self._host = on_host
        self._exchange: Exchange | None = None

    def _all_counts(self) -> Tensor:
        at = self.at
        counts = torch.cat([self.routing.tokens_per_expert(at.num_experts), self.wanted.sum(0)])[None]
        by_rank = gather_rows(gather_rows(counts, at.ep_group), at.etp_group)  # [etp * ep, experts + ep]
        return by_rank.view(at.etp_size, at.ep_size, -1)

    def send(self, hidden: Tensor) -> None:
        at, routing = self.at, self.routing
        ranks = torch.arange(at.ep_size, device=hidden.device).expand_as(self.wanted)  # [t, ep]
        sizes = self._host()[self.place, :, at.num_experts :]  # [from, to]
        count = int(sizes[self.mine].sum())
        self.copies, choice = at.backend.copies_by_group(ranks.contiguous(), self.wanted, count, at.ep_size)
        self.rows = at.backend.permute(hidden, self.copies)
        self.weights = at.backend.permute(routing.weights, self.copies)  # [n, k]
        numbers = routing.experts if routing.kept is None else torch.where(routing.kept, routing.experts, -1)
        local = numbers.index_select(0, self.copies.source) - (choice % at.ep_size * at.num_local_experts)[:, None]
        local = torch.where((local >= 0) & (local < at.num_local_experts), local, -1)
        self.numbers = local.to(torch.int32)
        """[n, k]: which of the experts of the rank that a row goes to it is for; -1: no more of them."""
        if at.ep_size > 1:
            self.to_experts = all_to_all_route(at.ep_group, sizes[self.mine].tolist(), sizes[:, self.mine].tolist())
            self._numbers = self.to_experts.go(self.numbers)
            self._exchange = Exchange(self.to_experts, self.baton, self.rows, self.weights)

    def arrive(self) -> ExpertRows:
        at = self.at
        rows, weights, numbers = self.rows, self.weights, self.numbers
        del self.rows, self.weights, self.numbers
        if self._exchange is not None:
            rows, weights = self._exchange.finish()
            numbers = self._numbers.wait()
            del self._numbers
        if at.etp_size > 1:
            parts = self._host()[:, :, at.num_experts + self.mine].sum(1).tolist()
            self.to_channels = uneven_gather_route(at.etp_group, parts, self.place)
            numbers = self.to_channels.go(numbers).wait()
            rows, weights = Exchange(self.to_channels, self.baton, rows, weights).finish()
        own = slice(self.mine * at.num_local_experts, (self.mine + 1) * at.num_local_experts)
        sizes = self._host()[..., own].sum((0, 1)).tolist()
        here, experts = numbers >= 0, numbers.clamp(min=0).to(torch.int64)
        self.local, choice = at.backend.copies_by_group(experts, here, sum(sizes), at.num_local_experts)
        copied = at.backend.permute(rows, self.local)
        own_weights = at.weights_of(Routing(experts, weights), self.local, choice)
        counts = self.copy_counts[:, :, self.mine].sum((0, 1))
        return ExpertRows(copied, own_weights, RowGroups(counts, sizes))

    def send_back(self, results: Tensor) -> None:
        at = self.at
        rows = at.backend.unpermute(results, self.local)
        if at.etp_size > 1:
            (rows,) = Exchange(self.to_channels.reversed(), self.baton, rows).finish()
        self.rows = rows
        if at.ep_size > 1:
            self._exchange = Exchange(self.to_experts.reversed(), self.baton, rows)

    def come_home(self) -> Tensor:
        rows = self.rows
        del self.rows
        if self._exchange is not None:
            (rows,) = self._exchange.finish()
        return self.at.backend.unpermute(rows, self.copies)
