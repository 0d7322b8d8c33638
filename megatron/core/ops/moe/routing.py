"""Routing of tokens to experts: scores, group-limited top-k, Sinkhorn balancing and expert capacity.

All are pure functions of the logits [t, experts] of one rank or of a whole micro-batch. Among equal scores the first
expert wins, for any order of the sort and number of tokens. So a token's experts are the same in every layout, even
in half precision, where logits are often equal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.precision import widened
from megatron.core.parameters import main_grad_accumulator
from megatron.core.utils.autograd_context import AutogradContext

ScoreFunction = Literal["softmax", "sigmoid"]

TINY = 1e-20
"""Added to divisors, to avoid dividing by zero."""


def bfloat16_parts(numbers: Tensor) -> Tensor:
    """Returns three bfloat16 tensors side by side, [t, n] -> [t, 3 n], whose sum is the float32 numbers. Each has 8 of
    their 24 bits, the first those that count most."""
    first = numbers.bfloat16()
    rest = numbers - first
    second = rest.bfloat16()
    return torch.cat((first, second, (rest - second).bfloat16()), 1)


def router_logits(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    parts: Callable[[Tensor], Tensor] = bfloat16_parts,
) -> Tensor:
    """Returns the logits: [t, h] x [experts, h] (+ [experts]) -> [t, experts], computed in `dtype`, which must not be
    narrower than the inputs' types.

    Backward keeps the inputs in their own type. The weight's gradient goes to its main gradient unrounded. On a GPU
    tensor cores compute products of bfloat16 numbers: they are exact, and their sums are float32. Gradients, which are
    float32, are split into bfloat16 parts for them. `parts` computes `bfloat16_parts`.
    """
    return _RouterLogits.apply(inputs, weight, bias, dtype, parts)


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        parts: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.dtype = weight, dtype  # the parameter, not a saved tensor: see ops/linear.py
        ctx.parts = parts if _multiplies_in_parts(inputs, weight, dtype) else None
        if ctx.parts is not None:
            logits = _exact_product(inputs.reshape(-1, inputs.shape[-1]), weight.t())
            logits = logits.view(*inputs.shape[:-1], weight.shape[0])
            return logits if bias is None else logits.add_(bias)
        return F.linear(inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        needs_inputs, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        inputs_gradient = weight_gradient = bias_gradient = None
        rows = gradient.reshape(-1, weight.shape[0])
        factor, accumulate = (rows, _accumulate_wide) if ctx.parts is None else (ctx.parts(rows), _accumulate_parts)
        if needs_inputs:
            inputs_gradient = _inputs_gradient(factor, weight.detach(), ctx).to(inputs.dtype).view(inputs.shape)
        if needs_weight:
            main_grad, columns = main_grad_accumulator(weight), inputs.detach().reshape(-1, weight.shape[1])
            if main_grad is None:
                total = torch.zeros(weight.shape, dtype=ctx.dtype, device=weight.device)
                accumulate(total, factor, columns)
                weight_gradient = total.to(weight.dtype)
            else:
                main_grad.add_grouped_product(factor, columns, accumulate)
        if needs_bias:
            bias_gradient = rows.sum(0)
        return inputs_gradient, weight_gradient, bias_gradient, None, None


def _multiplies_in_parts(inputs: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether tensor cores compute the products of a router in float32."""
    return inputs.is_cuda and dtype is torch.float32 and inputs.dtype is weight.dtype is torch.bfloat16


def _exact_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right of bfloat16 numbers in float32."""
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


def _inputs_gradient(factor: Tensor, weight: Tensor, ctx: AutogradContext) -> Tensor:
    if ctx.parts is None:
        return factor @ weight.to(ctx.dtype)
    return factor[:, : 2 * weight.shape[0]] @ weight.repeat(2, 1)  # rounded to bfloat16, so two parts are enough


def _accumulate_parts(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """Adds `factor` times left^T @ right to `total`, with the left factor as `bfloat16_parts` returns it: bfloat16 [t,
    3 out] and [t, in] into [out, in]."""
    product = _exact_product(left.t(), right)
    total.add_(product.view(3, *total.shape).sum(0), alpha=factor)


def _accumulate_wide(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """Adds `factor` times left^T @ right to `total`, in its type: [t, out] and [t, in] into [out, in]."""
    total.addmm_(left.t().to(total.dtype), right.to(total.dtype), alpha=factor)


# ---------------------------------------------------------------------------------------------------------------------
# Top-k


@dataclass(frozen=True)
class RoutingRule:
    """How a token's logits determine its experts and their weights."""

    topk: int
    """Number of experts per token."""
    score_function: ScoreFunction = "softmax"
    scores_first: bool = False
    """True: softmax over all experts, then top-k. False: top-k, then softmax over those. A sigmoid always comes
    first."""
    renormalises: bool = False
    """If true, a token's weights are divided by their sum."""
    factor: float | None = None
    """Final factor of the weights."""
    num_groups: int | None = None
    """Number of equal groups of neighbouring experts; a token first chooses `groups_kept` of them."""
    groups_kept: int = 0
    group_score_of: int = 0
    """A group's score is the sum of this many of its best scores."""


def weights_sum_to_one(rule: RoutingRule) -> bool:
    """Whether the weights of each token's experts sum to 1."""
    late_softmax = rule.score_function == "softmax" and not rule.scores_first
    return (late_softmax or rule.renormalises) and rule.factor in (None, 0.0, 1.0)


def choose_experts(
    logits: Tensor,
    rule: RoutingRule,
    bias: Tensor | None = None,
    given: Tensor | None = None,
    choose: Callable[[Tensor, int], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token (int64 [t, k], best first) and their weights ([t, k], float32 at least).

    `bias` [experts] is added to the scores for the choice only, not to the weights (Wang et al. 2024,
    arXiv:2408.15664). With `given` (int64 [t, k]) these are the experts, and only the weights are computed. Gradients
    reach the logits through the weights. `choose` computes `best` (None: that function).
    """
    scores = widened(logits)
    late_softmax = rule.score_function == "softmax" and not rule.scores_first
    if not late_softmax:
        scores = torch.sigmoid(scores) if rule.score_function == "sigmoid" else torch.softmax(scores, -1)
    compared = scores.detach() if bias is None else scores.detach() + bias
    if rule.num_groups is not None:
        compared = within_best_groups(compared, rule.num_groups, rule.groups_kept, rule.group_score_of)
    experts = (choose or best)(compared, rule.topk) if given is None else given
    weights = scores.gather(1, experts)
    if late_softmax:
        weights = torch.softmax(weights, -1)
    if rule.renormalises:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    if rule.factor:
        weights = weights * rule.factor
    return experts, weights


@dataclass(frozen=True)
class Choice:
    """The experts of tokens, and what load-balancing losses need to know of the choice."""

    experts: Tensor
    """int64 [t, k], best first."""
    weights: Tensor
    """[t, k], float32 at least."""
    score_sums: Tensor | None = None
    """`balance_sums` of the logits, [experts]; None: not computed."""
    counts: Tensor | None = None
    """`count_experts` of the choice, int64 [experts]; None: not computed."""


def choose_and_count(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, real: Tensor | None = None
) -> Choice:
    """Returns `choose_experts` with the sums and counts of load-balancing losses. `real`, bool [t], tells which tokens
    are summed and counted; None: all. Gradients reach the logits through weights and sums."""
    experts, weights = choose_experts(logits, rule, bias)
    counts = count_experts(experts, logits.shape[1], real)
    return Choice(experts, weights, balance_sums(logits, rule.score_function, real), counts)


def best(scores: Tensor, count: int) -> Tensor:
    """Returns the indices (int64 [t, count]) of the largest scores, in descending order; among equals the first."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def count_experts(experts: Tensor, num_experts: int, kept: Tensor | None = None) -> Tensor:
    """Returns how many choices each expert has among `experts` (int64 [t, k]): int64 [experts]. `kept`, bool [t, k] or
    [t], tells which choices, or which tokens, count; None: all. Does not wait for the device."""
    if kept is None:
        ones = torch.ones_like(experts)
    else:
        ones = (kept if kept.dim() == experts.dim() else kept[:, None].expand_as(experts)).to(torch.int64)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts.flatten(), ones.flatten())


def within_best_groups(scores: Tensor, num_groups: int, kept: int, score_of: int) -> Tensor:
    """Returns scores [t, experts] with -inf outside the `kept` best of `num_groups` groups of neighbouring experts. A
    group's score is the sum of its `score_of` best scores (DeepSeek-AI 2024, arXiv:2405.04434 and 2412.19437)."""
    grouped = scores.unflatten(-1, (num_groups, -1))  # [t, groups, experts / groups]
    group_scores = grouped.topk(score_of, -1).values.sum(-1)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best(group_scores, kept), True)
    return grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(1)


def balance_scores(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Returns the scores [t, experts] that load-balancing losses use; each token's scores sum to 1."""
    scores = widened(logits)
    if score_function == "softmax":
        return torch.softmax(scores, -1)
    scores = torch.sigmoid(scores)
    return scores / (scores.sum(-1, keepdim=True) + TINY)


def balance_sums(logits: Tensor, score_function: ScoreFunction, real: Tensor | None = None) -> Tensor:
    """Returns the sum over tokens of `balance_scores`, [experts]. `real`, bool [t], tells which tokens count; None:
    all."""
    scores = balance_scores(logits, score_function)
    return (scores if real is None else scores * real[:, None]).sum(0)


# ---------------------------------------------------------------------------------------------------------------------
# Operations that couple the tokens of a micro-batch


@torch.no_grad()
def sinkhorn(cost: Tensor, tolerance: float = 1e-4, iterations: int = 64) -> Tensor:
    """Scales rows and columns of a positive matrix [t, experts] so that all tokens and all experts have equal sums
    (Sinkhorn and Knopp 1967).

    The result is that of the first iteration after which the columns' factors change by at most `tolerance` on average,
    or of the last. All `iterations` are always computed, so the host never waits for the device. Logits with standard
    deviations 1, 3 and 10 need about 5, 10 and 30 iterations for thousands of tokens. Few tokens with larger logits may
    need a hundred, and the factors of a matrix of tiny numbers are so large that they never converge to `tolerance`.
    """
    tokens, experts = cost.shape
    if tokens == 0:
        return cost
    columns = cost.new_ones(iterations + 1, experts)  # factors before the first iteration, and after each
    transposed = cost.t()
    for number in range(iterations):
        columns[number + 1] = _equal_shares(transposed, _equal_shares(cost, columns[number]))
    change = (columns[1:] - columns[:-1]).abs().mean(1)
    ended = (change <= tolerance) | ~columns[1:].isfinite().all(1)
    before = (ended[:-1].cumsum(0) == 0).sum().view(1)  # iterations before the chosen one
    rows = _equal_shares(cost, columns.index_select(0, before)[0])
    return columns.index_select(0, before + 1) * cost * rows[:, None]


def _equal_shares(matrix: Tensor, factors: Tensor) -> Tensor:
    """Returns the factors [n] of a matrix's rows [n, m] that give each row the sum 1 / n, given the factors [m] of its
    columns. 1e-8 keeps them finite."""
    count = matrix.shape[0]
    return torch.addmv(factors.new_full((count,), count * 1e-8), matrix, factors, alpha=count).reciprocal_()


@torch.no_grad()
def within_capacity(
    experts: Tensor, capacity: int | Tensor, wish: Tensor | None, order: Tensor | None = None
) -> Tensor:
    """Returns which pairs (token, its j-th expert) are kept, bool [t, k], if each expert takes `capacity` tokens.

    An expert takes the tokens with the largest `wish` [t, k], among equals the first; without `wish`, the first tokens.
    "First" means by row, or by `order` (int64 [t], all different).
    """
    tokens, k = experts.shape
    pairs = torch.arange(tokens * k, device=experts.device)
    if order is not None:  # a token has an expert only once, so ties within a token do not matter
        pairs = torch.argsort(order)[:, None].mul(k).add(pairs[:k]).flatten()
    if wish is not None:
        pairs = pairs[torch.sort(wish.flatten()[pairs], descending=True, stable=True).indices]
    chosen, by_expert = torch.sort(experts.flatten()[pairs], stable=True)
    pairs = pairs[by_expert]
    first = torch.searchsorted(chosen, chosen)  # start of the range of each pair's expert
    found = torch.arange(tokens * k, device=experts.device) - first < capacity
    return torch.empty_like(found).scatter_(0, pairs, found).view(tokens, k)


# ---------------------------------------------------------------------------------------------------------------------


def straight_through(tensor: Tensor, numbers: Tensor) -> Tensor:
    """Returns `numbers`; their gradient goes to `tensor`, of the same shape and type (straight-through estimator)."""
    return _StraightThrough.apply(tensor, numbers)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, numbers: Tensor) -> Tensor:
        return numbers

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
