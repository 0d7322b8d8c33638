"""Choosing experts for tokens: scores, groups, the best few, balance by Sinkhorn, and who finds room.

Pure functions of one rank's logits [t, experts], or of those of a whole micro-batch. Nothing depends on the order of
equal numbers in a sort or on how many tokens are looked at together: of equals the first wins, so that a token's
experts are the same in every layout, also where half-precision logits are often equal.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import Pending
from megatron.core.ops.precision import widened
from megatron.core.parameters import main_grad_accumulator

ScoreFunction = Literal["softmax", "sigmoid"]

_TINY = 1e-20
"""Added to sums that are divided by."""


def router_logits(inputs: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[t, h] x [experts, h] (+ [experts]) -> [t, experts], computed in `dtype`, which is not narrower than theirs.

    Inputs are kept as they are given, not in the wider type, and the weight's gradient goes to its sink unrounded.
    """
    return _RouterLogits.apply(inputs, weight, bias, dtype)


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.dtype = weight, dtype  # the parameter, not a saved tensor: see ops/linear.py
        return F.linear(inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        needs_inputs, needs_weight, needs_bias, _ = ctx.needs_input_grad
        inputs_gradient = weight_gradient = bias_gradient = None
        if needs_inputs:
            inputs_gradient = (gradient @ weight.detach().to(ctx.dtype)).to(inputs.dtype)
        if needs_weight:
            sink, columns = main_grad_accumulator(weight), inputs.detach()
            if sink is None:
                weight_gradient = (gradient.t() @ columns.to(ctx.dtype)).to(weight.dtype)
            else:
                defers_weight_grad = getattr(sink, "defers_weight_grad", False)
                sink.add_product(gradient, _Narrow(columns, ctx.dtype) if defers_weight_grad else columns.to(ctx.dtype))
        if needs_bias:
            bias_gradient = gradient.sum(0)
        return inputs_gradient, weight_gradient, bias_gradient, None


@dataclass(frozen=True)
class _Narrow:
    """Inputs of a product that is put off, kept in their own type until it is run."""

    rows: Tensor
    dtype: torch.dtype

    def start_gather(self) -> Pending:
        return Pending(self.rows.to(self.dtype), None)


# ---------------------------------------------------------------------------------------------------------------------
# The best few


@dataclass(frozen=True)
class RoutingRule:
    """How logits become experts and weights."""

    topk: int
    """Experts of a token."""
    score_function: ScoreFunction = "softmax"
    scores_first: bool = False
    """Softmax over all experts, of which the best are taken; else over the best. A sigmoid is always taken first."""
    renormalises: bool = False
    """The weights of the picked are divided by their sum."""
    factor: float | None = None
    """What weights are multiplied by in the end."""
    num_groups: int | None = None
    """Groups of neighbouring experts, of equal size, of which a token chooses `groups_kept` first."""
    groups_kept: int = 0
    group_score_of: int = 0
    """How many of a group's best scores are added up to the group's own."""


def choose_experts(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Experts int64 [t, k], the best first, and their weights [t, k], in float32 at least.

    `bias` [experts] is added to scores where they are compared, and not to weights (Wang et al. 2024,
    arXiv:2408.15664). Gradients reach the logits through the weights.
    """
    scores = widened(logits)
    late_softmax = rule.score_function == "softmax" and not rule.scores_first
    if not late_softmax:
        scores = torch.sigmoid(scores) if rule.score_function == "sigmoid" else torch.softmax(scores, -1)
    compared = scores.detach() if bias is None else scores.detach() + bias
    if rule.num_groups is not None:
        compared = within_best_groups(compared, rule.num_groups, rule.groups_kept, rule.group_score_of)
    experts = best(compared, rule.topk)
    weights = scores.gather(1, experts)
    if late_softmax:
        weights = torch.softmax(weights, -1)
    if rule.renormalises:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    if rule.factor:
        weights = weights * rule.factor
    return experts, weights


def best(scores: Tensor, count: int) -> Tensor:
    """Indices int64 [t, count] of the greatest along the last dimension, descending; of equals the first."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def within_best_groups(scores: Tensor, num_groups: int, kept: int, score_of: int) -> Tensor:
    """Scores [t, experts] with -inf outside of the `kept` best of `num_groups` groups of neighbours; a group's score is
    the sum of its `score_of` best (DeepSeek-AI 2024, arXiv:2405.04434 and 2412.19437)."""
    grouped = scores.unflatten(-1, (num_groups, -1))  # [t, groups, experts / groups]
    group_scores = grouped.topk(score_of, -1).values.sum(-1)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best(group_scores, kept), True)
    return grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(1)


def balance_scores(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """The scores [t, experts] by which balance is judged: each token's sum to 1."""
    scores = widened(logits)
    if score_function == "softmax":
        return torch.softmax(scores, -1)
    scores = torch.sigmoid(scores)
    return scores / (scores.sum(-1, keepdim=True) + _TINY)


# ---------------------------------------------------------------------------------------------------------------------
# What couples the tokens of a micro-batch


@torch.no_grad()
def sinkhorn(cost: Tensor, tolerance: float = 1e-4, iterations: int = 64) -> Tensor:
    """The positive matrix [t, experts] scaled by rows and columns so that all tokens and all experts have equal shares
    (Sinkhorn and Knopp 1967), until the mean change of the columns' factors is at most `tolerance`.

    As many `iterations` are done whatever comes, so that nobody asks the device whether it was enough, and the one
    after which it was is taken, or else the last. Logits of standard deviation 1, 3 and 10 take about 5, 10 and 30 for
    thousands of tokens; with few tokens and larger ones it may be a hundred, and the factors of a matrix of tiny
    numbers are so great that their last digits never come to rest.
    """
    tokens, experts = cost.shape
    if tokens == 0:
        return cost
    columns = cost.new_ones(iterations + 1, experts)  # factors before the first iteration and after each
    transposed = cost.t()
    for number in range(iterations):
        columns[number + 1] = _equal_shares(transposed, _equal_shares(cost, columns[number]))
    change = (columns[1:] - columns[:-1]).abs().mean(1)
    ended = (change <= tolerance) | ~columns[1:].isfinite().all(1)
    before = (ended[:-1].cumsum(0) == 0).sum().view(1)  # iterations before the one that is taken
    rows = _equal_shares(cost, columns.index_select(0, before)[0])
    return columns.index_select(0, before + 1) * cost * rows[:, None]


def _equal_shares(matrix: Tensor, factors: Tensor) -> Tensor:
    """Factors [n] of the rows of a matrix [n, m] that give each 1 / n, with `factors` [m] of its columns; 1e-8 keeps
    them finite."""
    count = matrix.shape[0]
    return torch.addmv(factors.new_full((count,), count * 1e-8), matrix, factors, alpha=count).reciprocal_()


@torch.no_grad()
def within_capacity(experts: Tensor, capacity: int, wish: Tensor | None, order: Tensor | None = None) -> Tensor:
    """Which of the pairs (token, its j-th expert) find room, bool [t, k], if each expert takes `capacity` tokens.

    An expert takes those with the greatest `wish` [t, k], of equals the first; without wishes, the first. Tokens are
    counted as they lie, or by `order` (int64 [t], all different).
    """
    tokens, k = experts.shape
    pairs = torch.arange(tokens * k, device=experts.device)
    if order is not None:  # pairs of one expert are of different tokens: ties within a token do not matter
        pairs = torch.argsort(order)[:, None].mul(k).add(pairs[:k]).flatten()
    if wish is not None:
        pairs = pairs[torch.sort(wish.flatten()[pairs], descending=True, stable=True).indices]
    chosen, by_expert = torch.sort(experts.flatten()[pairs], stable=True)
    pairs = pairs[by_expert]
    first = torch.searchsorted(chosen, chosen)  # where the run of each pair's expert begins
    found = torch.arange(tokens * k, device=experts.device) - first < capacity
    return torch.empty_like(found).scatter_(0, pairs, found).view(tokens, k)


# ---------------------------------------------------------------------------------------------------------------------


def straight_through(tensor: Tensor, numbers: Tensor) -> Tensor:
    """`numbers`; the gradient goes to `tensor`, of the same shape and type, as if they were its own."""
    return _StraightThrough.apply(tensor, numbers)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, numbers: Tensor) -> Tensor:
        return numbers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
