"""The router: chooses the experts and weights of each token, and balances the experts' load."""

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from megatron.core.backends import Backend
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.initializers import Constant
from megatron.core.ops.attached_loss import attach_loss
from megatron.core.ops.moe.routing import (
    Choice,
    RoutingRule,
    balance_scores,
    balance_sums,
    choose_experts,
    count_experts,
    sinkhorn,
    straight_through,
    within_capacity,
)
from megatron.core.ops.moe.token_noise import token_normal, token_uniform
from megatron.core.ops.precision import widened
from megatron.core.parameters import declare
from megatron.core.tensor_parallel.storage import parameter_device
from megatron.core.transformer.config.router import listed
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.layer_metrics import LayerMetrics
from megatron.core.transformer.moe.auxiliary_losses import (
    LOSS_NAMES,
    GlobalBalance,
    coefficients,
    micro_batch_loss,
    sequence_loss,
    z_loss,
)
from megatron.core.transformer.moe.base_router import Router
from megatron.core.transformer.moe.micro_batch_share import (
    MicroBatchShare,
    micro_batch_share,
    micro_batch_share_of_rows,
)
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.recompute_cache import run_once_under_recompute

RoutingObserver = Callable[["TopKRouter", Tensor | None, Tensor, Tensor, Tensor], None]


class TopKRouter(Router):
    """Sends each token to the k experts with the best scores (Shazeer et al. 2017; Fedus et al. 2021).

    Operations that couple tokens (capacity, Sinkhorn, auxiliary losses) act on the whole micro-batch, even if tensor
    and context parallel ranks share it. Parameters: `weight` [experts, h], `bias` [experts] with `moe_router_bias`, and
    `expert_bias` [experts], float32, with `moe_router_enable_expert_bias`. `expert_bias` has no gradient; it is
    adjusted when the gradients of a step are finalized.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        layer_number: int | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(config, pg_collection, layer_number=layer_number, backend=backend)
        self.rule = routing_rule(config)
        kinds = config.moe_router_load_balancing_type
        self.uses_sinkhorn = "sinkhorn" in listed(kinds)
        self.balance = coefficients(kinds, config.moe_aux_loss_coeff)
        self.global_balance = GlobalBalance()
        self.metrics = LayerMetrics(0)
        self.replay = RouterReplay() if config.moe_enable_routing_replay else None
        self.observers: list[RoutingObserver] = []
        """Called in training with (router, hidden states [t, h] or None, logits [t, experts], experts [t, k], weights
        [t, k]) of each micro-batch, once under recomputation."""
        self.set_layer_number(layer_number or 0)
        self.register_parameter("expert_bias", None)
        self.local_tokens_per_expert: Tensor | None = None
        """Tokens per expert of this rank since the last step, float64 [experts]; None: no count yet, or not needed."""
        if config.moe_router_enable_expert_bias:
            zeros = torch.zeros(self.num_experts, dtype=torch.float32, device=parameter_device(config))
            self.expert_bias = declare(nn.Parameter(zeros, requires_grad=False), Constant(0.0), is_state=True)

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the layer's number, counted over the whole model from 1. Noise and metrics depend on it."""
        self.layer_number = self.metrics.layer = layer_number
        if self.replay is not None:
            self.replay.layer_number = layer_number

    def route(self, hidden: Tensor, inputs: LayerInputs) -> Routing:
        """Returns the routing of this rank's tokens [t, h]: the tokens of `inputs.tokens`, or under sequence
        parallelism this rank's part. In training, auxiliary losses are attached to logits and weights."""
        share = micro_batch_share(
            inputs.tokens, hidden.shape[0], self.groups, self.config.sequence_parallel, inputs.padding_mask
        )
        return self._routing(self._logits(hidden, share), share, inputs.auxiliary_scale, hidden)

    def _routing(
        self, logits: Tensor, share: MicroBatchShare, scale: Tensor | None, hidden: Tensor | None = None
    ) -> Routing:
        if self._adds_losses and self.config.moe_z_loss_coeff:
            value = z_loss(logits, share)
            logits = self._attach(logits, "z_loss", value, self.config.moe_z_loss_coeff, share, scale)
        choice = self._choose(logits, share)
        experts, weights = choice.experts, choice.weights
        if self.observers and torch.is_grad_enabled():
            noted = self, hidden, logits, experts, weights
            run_once_under_recompute((self, "observers"), lambda: [observe(*noted) for observe in self.observers])
        if self._adds_losses and self.balance:
            weights = self._balanced(choice, logits, share, scale)
        routing = self._within_capacity(experts, weights, share)
        counts = choice.counts if routing.kept is None else None
        routing = dataclasses.replace(
            routing, counts=routing.tokens_per_expert(self.num_experts) if counts is None else counts
        )
        if torch.is_grad_enabled():
            run_once_under_recompute((self, "token counts"), lambda: self._count(routing, share.real))
        return routing

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns Megatron-LM's pair for this rank's hidden states [s, b, h]: weights [t, experts], 0 for experts that
        a token is not sent to, and a bool map [t, experts]. Auxiliary losses have the scale 1. Tokens where
        `padding_mask` [s, b] is True are sent to no expert."""
        share = self._share_of_rows(input, padding_mask)
        logits = self._logits(input.flatten(0, 1), share)
        return self.routing(logits.view(*input.shape[:2], -1), padding_mask)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the same pair for this rank's logits [s, b, experts]; see `forward`."""
        share = self._share_of_rows(logits, padding_mask)
        return self._routing(logits.flatten(0, 1), share, None).dense(self.num_experts)

    def _share_of_rows(self, rows: Tensor, padding_mask: Tensor | None) -> MicroBatchShare:
        s, b = rows.shape[:2]
        share = micro_batch_share_of_rows(s, b, self.groups, self.config.sequence_parallel)
        real = None if padding_mask is None else ~padding_mask.to(torch.bool).flatten()
        return dataclasses.replace(share, real=real)

    def is_aux_loss_enabled(self) -> bool:
        """Returns whether any balance loss has a coefficient other than 0."""
        return bool(self.balance)

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Returns the coefficient of this load-balancing loss; 0 if the loss is switched off."""
        return self.balance.get(aux_loss_type, 0.0)

    # -----------------------------------------------------------------------------------------------------------------
    # Steps of the routing

    def _logits(self, hidden: Tensor, share: MicroBatchShare) -> Tensor:
        """Returns the logits [t, experts]."""
        logits = self.gating(self._jittered(hidden, share))
        if self.config.moe_router_force_load_balancing:
            place = share.noise_position(self.config.seed, self.layer_number, "forced balance", logits.device)
            logits = straight_through(logits, token_normal(place, self.num_experts).to(logits.dtype))
        return logits

    def _jittered(self, hidden: Tensor, share: MicroBatchShare) -> Tensor:
        width = self.config.moe_input_jitter_eps
        if not width or not self.training:
            return hidden
        place = share.noise_position(self.config.seed, self.layer_number, "router jitter", hidden.device)
        noise = token_uniform(place, hidden.shape[1])
        return hidden * (1.0 + width * (2.0 * noise - 1.0)).to(hidden.dtype)

    def _choose(self, logits: Tensor, share: MicroBatchShare) -> Choice:
        if self.uses_sinkhorn:
            return Choice(*self._choose_by_sinkhorn(logits, share))
        if self.replay is None and self._adds_losses and self.balance.keys() & {"aux_loss", "global_aux_loss"}:
            return self.backend.experts.choose_and_count(logits, self.rule, self.expert_bias, share.real)
        if self.replay is None:
            return Choice(*self.backend.experts.choose_experts(logits, self.rule, self.expert_bias))
        given = self.replay.given(logits.shape[0], self.topk)
        experts, weights = choose_experts(logits, self.rule, self.expert_bias, given)
        self.replay.note(experts)
        return Choice(experts, weights)

    def _choose_by_sinkhorn(self, logits: Tensor, share: MicroBatchShare) -> tuple[Tensor, Tensor]:
        if share.real is not None:
            raise UserError("padding_mask does not go with sinkhorn routing, which balances all tokens; leave it out")
        wide = widened(logits)
        scores = torch.sigmoid(wide) if self.topk == 1 else torch.softmax(wide, -1)
        compared = self._sinkhorn_scores(logits, share) if self.training else scores
        experts = self.backend.experts.best(compared.detach(), self.topk)
        return experts, scores.gather(1, experts)

    @torch.no_grad()
    def _sinkhorn_scores(self, logits: Tensor, share: MicroBatchShare) -> Tensor:
        # In float64: exp does not overflow, and the split of tokens over ranks does not change comparisons.
        return share.own(sinkhorn(share.gather(logits.double().exp())))

    def _within_capacity(self, experts: Tensor, weights: Tensor, share: MicroBatchShare) -> Routing:
        """Returns the routing of tokens whose experts have room. Padding is sent to no expert and takes no room."""
        kept = None if share.real is None else share.real[:, None].expand_as(experts)
        capacity = self._capacity(share)
        if capacity is not None:
            # One more expert, for padding.
            wanted = experts if kept is None else torch.where(kept, experts, self.num_experts)
            wish = share.gather(weights.detach()) if self.config.moe_token_drop_policy == "probs" else None
            order = share.order(experts.device)
            order = None if order is None else share.gather(order)
            found = share.own(within_capacity(share.gather(wanted), capacity, wish, order))
            kept = found if kept is None else kept & found
        return Routing(experts, weights if kept is None else weights * kept, kept)

    def _capacity(self, share: MicroBatchShare) -> int | Tensor | None:
        """Returns how many tokens of the micro-batch an expert takes; None: all that are sent to it."""
        factor = self.config.moe_expert_capacity_factor
        if factor is None or factor < 0:
            return None
        if share.real is not None:
            return torch.as_tensor(share.routed_total * self.topk / self.num_experts * factor).ceil()
        capacity = math.ceil(share.total * self.topk / self.num_experts * factor)
        return capacity if capacity < share.total else None

    # -----------------------------------------------------------------------------------------------------------------
    # Losses and counts

    @property
    def _adds_losses(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _balanced(self, choice: Choice, logits: Tensor, share: MicroBatchShare, scale: Tensor | None) -> Tensor:
        weights = choice.weights
        # Balance is measured without bias and groups.
        if self.expert_bias is not None or self.rule.num_groups is not None:
            scores = balance_scores(logits.detach(), self.rule.score_function)
            choice = dataclasses.replace(choice, experts=self.backend.experts.best(scores, self.topk), counts=None)
        for kind, coefficient in self.balance.items():
            value = self._balance_loss(kind, logits, choice, share)
            weights = self._attach(weights, kind, value, coefficient, share, scale)
        return weights

    def _balance_loss(self, kind: str, logits: Tensor, choice: Choice, share: MicroBatchShare) -> Tensor:
        function, sums, counts = self.rule.score_function, choice.score_sums, choice.counts
        if kind == "seq_aux_loss":
            return sequence_loss(balance_scores(logits, function), choice.experts, share)
        if sums is None:
            sums = balance_sums(logits, function, share.real)
        if counts is None:
            counts = count_experts(choice.experts, self.num_experts, share.real)
        if kind == "global_aux_loss":
            return self.global_balance.loss(sums, counts, self.topk, share, self.groups.tp_dp_cp)
        return micro_batch_loss(sums, counts, self.topk, share)

    def _attach(
        self,
        carrier: Tensor,
        kind: str,
        value: Tensor,
        coefficient: float,
        share: MicroBatchShare,
        scale: Tensor | None,
    ) -> Tensor:
        self.metrics.add(LOSS_NAMES[kind], value, 1.0 / share.ranks)
        # With a loss per token, gradients are later divided by the tokens of the global batch: multiply by the
        # micro-batch's tokens.
        tokens = share.routed_total if self.config.calculate_per_token_loss else 1
        return attach_loss(carrier, value * (coefficient * tokens), scale)

    def _count(self, routing: Routing, real: Tensor | None) -> None:
        counts = routing.tokens_per_expert(self.num_experts).double()
        self.metrics.add_load(counts)
        if routing.kept is not None and real is None:
            self.metrics.add("moe_dropped", (~routing.kept).sum(), routing.kept.numel())
        elif routing.kept is not None and real is not None and self.config.moe_expert_capacity_factor is not None:
            sent = real[:, None].expand_as(routing.kept)
            self.metrics.add("moe_dropped", (sent & ~routing.kept).sum(), sent.sum())
        if self.expert_bias is not None and self.training:
            self.add_token_counts(counts)

    def add_token_counts(self, counts: Tensor) -> None:
        """Adds tokens per expert, float64 [experts], to those since the last step."""
        seen = self.local_tokens_per_expert
        self.local_tokens_per_expert = counts if seen is None else seen + counts

    # -----------------------------------------------------------------------------------------------------------------
    # The end of a step

    def take_tokens_per_expert(self) -> Tensor:
        """Returns the tokens per expert of this rank since the last call, float64 [experts], and resets them."""
        counts, self.local_tokens_per_expert = self.local_tokens_per_expert, None
        return (
            torch.zeros(self.num_experts, dtype=torch.float64, device=self.weight.device) if counts is None else counts
        )

    @torch.no_grad()
    def move_expert_bias(self, tokens_per_expert: Tensor) -> None:
        """Raises the bias of experts with fewer tokens than the mean and lowers that of experts with more.
        `tokens_per_expert` [experts] counts the global batch."""
        assert self.expert_bias is not None
        direction = torch.sign(tokens_per_expert.mean() - tokens_per_expert)
        self.expert_bias.add_(direction.to(self.expert_bias.dtype), alpha=self.config.moe_router_bias_update_rate)

    def reset_global_aux_loss_tracker(self) -> None:
        """Resets the counts of global_aux_loss at the start of a global batch."""
        self.global_balance.reset()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TopKRouter":
        # The expert bias moves with the module and stays float32: its updates are smaller than half precision resolves.
        before = None if self.expert_bias is None else self.expert_bias.data
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias.dtype is not torch.float32:
            self.expert_bias.data = before.to(self.expert_bias.device)
        return self


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """The tokens per expert that a router has counted since the last step, as a `graph_capture.TensorRecord`."""

    router: TopKRouter

    def take_tensors(self) -> Tensor | None:
        """Returns the counts and resets them."""
        counts, self.router.local_tokens_per_expert = self.router.local_tokens_per_expert, None
        return counts

    def add_tensors(self, tensors: Tensor | None) -> None:
        """Adds the counts that `take_tensors` returned."""
        if tensors is not None:
            self.router.add_token_counts(tensors)


def token_counts_of(chunks: Iterable[nn.Module]) -> list[TokenCounts]:
    """Returns the counts of all routers of a rank's model chunks."""
    return [TokenCounts(module) for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


def routing_rule(config: TransformerConfig) -> RoutingRule:
    """Returns the rule by which a config chooses a token's experts."""
    k, kept = config.moe_router_topk, config.moe_router_group_topk or 0
    renormalises = config.moe_router_norm_topk_prob
    if renormalises is None:
        renormalises = config.moe_router_score_function == "sigmoid" and k > 1
    return RoutingRule(
        topk=k,
        score_function=config.moe_router_score_function,
        scores_first=config.moe_router_pre_softmax,
        renormalises=renormalises,
        factor=config.moe_router_topk_scaling_factor,
        num_groups=config.moe_router_num_groups,
        groups_kept=kept,
        group_score_of=config.moe_router_group_score_topk or (k // kept if kept else 0),
    )
