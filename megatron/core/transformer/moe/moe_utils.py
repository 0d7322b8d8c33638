"""Megatron-LM's routing functions for users' own routers. They work on dense maps [t, experts].

They call megatron.core.ops.moe.routing, which the layers of this package use.
"""

import math

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.communication.collectives import Group, all_reduce
from megatron.core.exceptions import UserError
from megatron.core.ops.attached_loss import attach_loss
from megatron.core.ops.moe.permute import ChoiceNumbers
from megatron.core.ops.moe.permute import permute as permuted
from megatron.core.ops.moe.routing import (
    RoutingRule,
    ScoreFunction,
    balance_scores,
    best,
    choose_experts,
    within_best_groups,
    within_capacity,
)
from megatron.core.ops.moe.routing import sinkhorn as sinkhorn
from megatron.core.ops.precision import widened
from megatron.core.transformer.moe.routing import Routing
from megatron.homes import NotHere

# ---------------------------------------------------------------------------------------------------------------------
# Choice of experts


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: ScoreFunction = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: object = None,
    dense_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the weights [t, experts], zero for experts that a token is not sent to, and a bool map [t, experts]; with
    `dense_output` the weights and experts [t, k] instead. `fused` has no effect. Raises UserError for `router_replay`.
    """
    if router_replay is not None:
        raise UserError("topk_routing_with_score_function(router_replay=...): not yet; leave it out")
    kept = group_topk or 0
    rule = RoutingRule(
        topk,
        score_function,
        use_pre_softmax,
        score_function == "sigmoid" and topk > 1,
        scaling_factor,
        num_groups if kept else None,
        kept,
        topk // kept if kept else 0,
    )
    experts, weights = choose_experts(logits, rule, expert_bias)
    weights = weights.to(logits.dtype)
    return (weights, experts) if dense_output else Routing(experts, weights).dense(logits.shape[1])


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """Returns the best `topk` scores [t, k] and their experts, within the best `group_topk` of `num_groups` groups of
    neighbouring experts."""
    experts = best(within_best_groups(scores, num_groups, group_topk, topk // group_topk), topk)
    return scores.gather(1, experts), experts


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: ScoreFunction, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the bool map [t, experts] of each token's best experts, and the scores [t, experts], that load-balancing
    losses use."""
    scores = balance_scores(logits, score_function)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best(scores.detach(), topk), True)
    return chosen, scores


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Returns the capacity of an expert in tokens: ceil(tokens / experts * factor), at least `min_capacity`."""
    return max(math.ceil(num_tokens / num_experts * capacity_factor), min_capacity or 0)


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns weights and map [t, experts] without the dropped tokens: each expert accepts the `capacity` tokens with
    the largest weights (`probs`) or the first ones (`position`). Raises UserError for `pad_to_capacity`."""
    if pad_to_capacity:
        raise UserError("apply_router_token_dropping(pad_to_capacity=True): not yet; leave it out")
    if drop_policy not in ("probs", "position"):
        raise UserError(f"drop_policy {drop_policy!r}: unknown; choose from probs, position")
    tokens, num_experts = routing_probs.shape
    capacity = get_capacity(tokens * router_topk, num_experts, capacity_factor)
    every = torch.arange(num_experts, device=routing_map.device).expand(tokens, -1)
    experts = torch.where(routing_map, every, num_experts)  # unchosen pairs compete for an expert that does not exist
    wish = routing_probs.detach() if drop_policy == "probs" else None
    kept = within_capacity(experts, capacity, wish) & routing_map
    return routing_probs * kept, kept


def topk_softmax_with_capacity(
    logits: Tensor,
    topk: int,
    capacity_factor: float | None = None,
    pad_to_capacity: bool = False,
    drop_policy: str = "probs",
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    deterministic_mode: bool = False,
    score_function: ScoreFunction = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weights [t, experts], the bool map [t, experts] after dropping, and the number of tokens of each expert
    before dropping, as in Megatron-LM until release 0.12."""
    weights, chosen = topk_routing_with_score_function(
        logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias
    )
    counts = chosen.sum(0)
    if capacity_factor is not None:
        weights, chosen = apply_router_token_dropping(
            weights, chosen, topk, capacity_factor, drop_policy, pad_to_capacity
        )
    return weights, chosen, counts


# ---------------------------------------------------------------------------------------------------------------------
# Losses


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
) -> Tensor:
    """Returns coefficient * E / (k T^2) * sum_i P_i n_i, where P_i is the sum of `probs` [t, E] of expert i and n_i is
    `tokens_per_expert` (Fedus et al. 2021)."""
    aggregated = probs.sum(0)
    scale = num_experts * moe_aux_loss_coeff / (topk * total_num_tokens * total_num_tokens)
    return (aggregated * tokens_per_expert.to(aggregated.dtype)).sum() * scale


def z_loss_func(logits: Tensor, z_loss_coeff: float) -> Tensor:
    """Returns coefficient * mean of logsumexp(logits)^2 (Zoph et al. 2022)."""
    return torch.logsumexp(widened(logits), -1).square().mean() * z_loss_coeff


class MoEAuxLossAutoScaler:
    """Attaches an auxiliary loss to a tensor: backward gives the loss the gradient `main_loss_backward_scale`.

    The scale is set by `set_loss_scale` and is 1 before. Layers of this package take the scale of their micro-batch
    instead.
    """

    main_loss_backward_scale: Tensor | None = None

    @staticmethod
    def apply(output: Tensor, aux_loss: Tensor) -> Tensor:
        """Returns `output` unchanged, with the loss attached."""
        return attach_loss(output, aux_loss, MoEAuxLossAutoScaler.main_loss_backward_scale)

    @staticmethod
    def set_loss_scale(scale: Tensor) -> None:
        """Sets the gradient of losses that are attached from now on."""
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale


def get_updated_expert_bias(
    tokens_per_expert: Tensor, expert_bias: Tensor, expert_bias_update_rate: float, tokens_group: Group = None
) -> Tensor:
    """Returns the bias after a step: higher by the rate for experts with fewer tokens than the mean, lower for those
    with more. `tokens_group`: ranks whose counts are added first."""
    with torch.no_grad():
        counts = all_reduce(tokens_per_expert.clone(), tokens_group, ReduceOp.SUM)
        mean = counts.sum(-1, keepdim=True) / counts.shape[-1]
        return expert_bias + torch.sign(mean - counts).to(expert_bias.dtype) * expert_bias_update_rate


# ---------------------------------------------------------------------------------------------------------------------
# Order of tokens


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the rows of tokens [t, h] sorted by expert and within an expert by token, their weights if `probs` [t, E]
    is given, and the token index of each row (int64). Waits for the device unless `num_out_tokens`, the number of rows,
    is given. Raises UserError for `drop_and_pad`."""
    if drop_and_pad:
        raise UserError("permute(drop_and_pad=True): not yet; leave it out")
    rows = int(routing_map.sum().item()) if num_out_tokens is None else num_out_tokens
    num_experts = routing_map.shape[1]
    every = torch.arange(num_experts, device=tokens.device)
    copies, choice = ChoiceNumbers(torch.where(routing_map.bool(), every, -1), num_experts).copies(rows)
    weights = None if probs is None else probs.flatten()[choice]
    return permuted(tokens, copies), weights, copies.source


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    """Returns the sum of each token's rows [t, h] = `restore_shape`, multiplied by `probs` [t, E] (with `routing_map`)
    if these are given: the inverse of `permute`. Raises UserError for `drop_and_pad`."""
    if drop_and_pad:
        raise UserError("unpermute(drop_and_pad=True): not yet; leave it out")
    rows = permuted_tokens
    if probs is not None:
        if routing_map is None:
            raise UserError("unpermute(probs=...): give routing_map too")
        weights = probs.t()[routing_map.t().bool()]  # by expert, then by token, as the rows
        rows = rows * weights[:, None]
    total = torch.zeros(restore_shape, dtype=rows.dtype, device=rows.device)
    return total.index_add(0, sorted_indices, rows).to(permuted_tokens.dtype)


def sort_chunks_by_idxs(
    input: Tensor,
    split_sizes: Tensor,
    sorted_idxs: Tensor,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns the chunks of rows (`split_sizes`) and of their weights [rows], both in the order `sorted_idxs`."""
    sizes, order = split_sizes.tolist(), sorted_idxs.tolist()

    def reordered(rows: Tensor) -> Tensor:
        chunks = rows.split(sizes)
        return torch.cat([chunks[index] for index in order])

    return reordered(input), None if probs is None else reordered(probs)


# ---------------------------------------------------------------------------------------------------------------------
# The tracker of auxiliary losses

_NO_TRACKER = NotHere(
    "each layer keeps its own auxiliary losses, and there is no tracker; read them with take_layer_metrics(model) of "
    "megatron.core.transformer.layer_metrics, or let pretrain() log them"
)
clear_aux_losses_tracker = _NO_TRACKER.stand_in("clear_aux_losses_tracker")
get_moe_layer_wise_logging_tracker = _NO_TRACKER.stand_in("get_moe_layer_wise_logging_tracker")
reduce_aux_losses_tracker_across_ranks = _NO_TRACKER.stand_in("reduce_aux_losses_tracker_across_ranks")
save_to_aux_losses_tracker = _NO_TRACKER.stand_in("save_to_aux_losses_tracker")
track_moe_metrics = _NO_TRACKER.stand_in("track_moe_metrics")
