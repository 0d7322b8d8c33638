"""The dispatcher that sends one copy of a token to each of its experts."""

from torch import Tensor

from megatron.core.communication.async_collective import AsyncCollective, Route, all_to_all_route, uneven_gather_route
from megatron.core.communication.collectives import HostCopy
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.ops.moe.permute import Copies
from megatron.core.transformer.moe.dispatch import DispatchCombine, ExpertRows, TokenDispatcher
from megatron.core.transformer.moe.routing import Routing
from megatron.core.utils.recompute_cache import run_once_under_recompute


class MoEAlltoAllTokenDispatcher(TokenDispatcher):
    """Sends each copy of a token to the ranks that hold its expert. Row counts are computed on the device; one small
    copy per layer brings them to the host."""

    def plan(self, routing: Routing, turn: CooperativeTurn | None = None) -> DispatchCombine:
        """Returns the exchange for a routing."""
        return _CopyDispatchCombine(self, routing, turn)


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
            results = at.backend.experts.unpermute(results, self.order)
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
        return self.at.backend.experts.unpermute(rows, self.copies)


class _CopyDispatchCombine(AlltoAllDispatchCombine):
    def __init__(self, at: MoEAlltoAllTokenDispatcher, routing: Routing, turn: CooperativeTurn | None) -> None:
        super().__init__(at, routing, turn)
        self.counts = run_once_under_recompute((at, "token counts"), self._all_counts)
        """Number of rows from (etp rank, ep rank) for each expert of an ep rank."""
        self.knows_sizes = at.copies_sizes or at.ep_size * at.etp_size > 1 or routing.kept is not None
        self._on_host: HostCopy | None = None
        if self.knows_sizes:
            self._on_host = run_once_under_recompute((at, "counts on the host"), lambda: HostCopy(self.counts))

    def _all_counts(self) -> Tensor:
        at = self.at
        by_rank = at.of_all_ranks(self.routing.tokens_per_expert(at.num_experts)[None])  # [etp * ep, experts]
        return by_rank.view(at.etp_size, at.ep_size, at.ep_size, at.num_local_experts)

    def start_dispatch(self, hidden: Tensor) -> None:
        at, routing = self.at, self.routing
        count = routing.experts.numel()
        if routing.kept is not None:
            count = int(self._sizes()[at.etp_rank, at.ep_rank].sum())
        numbers = at.backend.experts.number_choices(routing.experts_with_room(), at.num_experts)
        self.copies, choice = numbers.copies(count)
        self.rows = at.backend.experts.permute(hidden, self.copies)
        self.weights = at.weights_of(routing.weights, self.copies, choice)
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
            self.order, _ = at.backend.experts.number_choices(experts, at.num_local_experts).copies(rows.shape[0])
            rows = at.backend.experts.permute(rows, self.order)
            weights = at.backend.experts.permute(weights[:, None], self.order)[:, 0]
        sizes = self._sizes()[:, :, at.ep_rank].sum((0, 1)).tolist() if self.knows_sizes else None
        return ExpertRows(rows, weights, RowGroups.of_sources(counts, sizes))

    def _sizes(self) -> Tensor:
        """Returns `counts` on the host."""
        assert self._on_host is not None
        return self._on_host.wait()
