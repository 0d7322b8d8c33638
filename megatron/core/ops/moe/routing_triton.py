"""Routing on a GPU: the best scores of each token and their weights, and the parts of the logits' gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.moe.routing import RoutingRule, best, choose_experts
from megatron.core.ops.tiles import cdiv, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_SCORES = 2048
"""Scores that one program compares."""
_MOST_EXPERTS = 2048
"""More scores of a token are sorted by torch."""
_NUMBERS = 2048
"""Numbers that one program splits into parts."""


@triton.jit
def _best_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    experts, weights, scores, tokens, width, k, factor,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr,
    MAGNITUDE: tl.constexpr, LOWEST: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDTH)
    valid = (token < tokens)[:, None] & (expert < width)[None, :]
    score = tl.load(scores + token[:, None] * width + expert[None, :], mask=valid, other=0.0).to(WIDE)
    # Whole numbers in the order of the scores: -0.0 equals 0.0, and all NaNs are equal and largest, as for torch.sort.
    bits = tl.where(score == 0.0, 0.0, score).to(KEY, bitcast=True)
    key = tl.where(bits < 0, bits ^ MAGNITUDE, bits)
    key = tl.where(score != score, MAGNITUDE, key)
    key = tl.where(valid, key, LOWEST)
    place = tl.zeros((TOKENS, WIDTH), tl.int32)
    for j in range(k):
        largest = tl.max(key, 1)
        first = tl.min(tl.where(key == largest[:, None], expert[None, :], WIDTH), 1)
        tl.store(experts + token * k + j, first.to(tl.int64), mask=token < tokens)
        chosen = expert[None, :] == first[:, None]
        key = tl.where(chosen, LOWEST, key)
        place = tl.where(chosen, j, place)
    if WEIGHS:  # softmax of the chosen scores
        taken = valid & (key == LOWEST)
        most = tl.max(tl.where(taken, score, float("-inf")), 1)
        power = tl.where(taken, tl.exp(score - most[:, None]), 0.0)
        weight = power / tl.sum(power, 1)[:, None] * factor
        tl.store(weights + token[:, None] * k + place, weight, mask=taken)


@triton.jit
def _choice_backward_kernel(  # type: ignore[no-untyped-def]
    gradient, weights_gradient, weights, experts, tokens, width, k, factor,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDTH)
    weight = tl.zeros((TOKENS, WIDTH), tl.float32)
    wanted = tl.zeros((TOKENS, WIDTH), tl.float32)
    for j in range(k):
        at = token * k + j
        chosen = tl.load(experts + at, mask=token < tokens, other=-1).to(tl.int32)[:, None] == expert[None, :]
        weight = tl.where(chosen, tl.load(weights + at, mask=token < tokens, other=0.0)[:, None], weight)
        wanted = tl.where(chosen, tl.load(weights_gradient + at, mask=token < tokens, other=0.0)[:, None], wanted)
    # Of softmax, whose results are the weights without the factor.
    mean = tl.sum(weight * wanted, 1) / factor
    change = weight * (wanted - mean[:, None])
    valid = (token < tokens)[:, None] & (expert < width)[None, :]
    tl.store(gradient + token[:, None] * width + expert[None, :], change.to(gradient.dtype.element_ty), mask=valid)


def choose_experts_triton(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes `routing.choose_experts`; the experts are the same to the bit. One kernel computes the softmax of the
    best logits, torch other rules and float64."""
    late_softmax = rule.score_function == "softmax" and not rule.scores_first
    plain = late_softmax and not rule.renormalises and rule.num_groups is None and bias is None and given is None
    if not plain or logits.shape[1] > _MOST_EXPERTS or logits.dtype is torch.float64:
        return choose_experts(logits, rule, bias, given, best_triton)
    return _Choice.apply(logits, rule.topk, rule.factor or 1.0)


class _Choice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, logits: Tensor, count: int, factor: float) -> tuple[Tensor, Tensor]:
        experts, weights = _best(logits, count, factor)
        ctx.save_for_backward(experts, weights)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)  # no zeros for the experts
        ctx.dtype, ctx.width, ctx.factor = logits.dtype, logits.shape[1], factor
        return experts, weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: AutogradContext, unused: None, weights_gradient: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        if weights_gradient is None:
            return None, None, None
        experts, weights = ctx.saved_tensors
        gradient = torch.empty(experts.shape[0], ctx.width, dtype=ctx.dtype, device=experts.device)
        if gradient.numel():
            grid, tile = _tiles(*gradient.shape)
            _choice_backward_kernel[grid](
                gradient, weights_gradient.contiguous(), weights, experts, *gradient.shape, experts.shape[1],
                ctx.factor, **tile,
            )  # fmt: skip
        return gradient, None, None


def _tiles(tokens: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    columns = next_power_of_2(width)
    at_once = max(1, min(_SCORES // columns, 256))
    return (cdiv(tokens, at_once),), {"TOKENS": at_once, "WIDTH": columns}


def best_triton(scores: Tensor, count: int) -> Tensor:
    """Computes `routing.best`, to the bit. Torch sorts whole numbers and more than 2048 scores of a token."""
    width = scores.shape[-1]
    if scores.dim() != 2 or width > _MOST_EXPERTS or not scores.dtype.is_floating_point:
        return best(scores, count)
    return _best(scores.detach(), count, None)[0]


def _best(scores: Tensor, count: int, factor: float | None) -> tuple[Tensor, Tensor]:
    """Returns the experts and, with a factor, their weights."""
    (tokens, width), scores = scores.shape, scores.contiguous()
    count = min(count, width)
    experts = torch.empty(tokens, count, dtype=torch.int64, device=scores.device)
    weights = torch.empty(tokens, count if factor is not None else 0, dtype=torch.float32, device=scores.device)
    if experts.numel():
        wide, key, bits = (tl.float64, tl.int64, 64) if scores.dtype is torch.float64 else (tl.float32, tl.int32, 32)
        grid, tile = _tiles(tokens, width)
        _best_kernel[grid](
            experts, weights, scores, tokens, width, count, 1.0 if factor is None else factor, **tile,
            WIDE=wide, KEY=key, MAGNITUDE=2 ** (bits - 1) - 1, LOWEST=-(2 ** (bits - 1)), WEIGHS=factor is not None,
        )  # fmt: skip
    return experts, weights


@triton.jit
def _parts_kernel(  # type: ignore[no-untyped-def]
    parts, numbers, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    number = tl.load(numbers + row * width + column, mask=inside)
    for part in tl.static_range(3):
        rounded = number.to(tl.bfloat16)
        tl.store(parts + (row * 3 + part) * width + column, rounded, mask=inside)
        number -= rounded.to(tl.float32)


def bfloat16_parts_triton(numbers: Tensor) -> Tensor:
    """Computes `routing.bfloat16_parts` in one kernel."""
    (rows, width), numbers = numbers.shape, numbers.contiguous()
    parts = torch.empty(rows, 3 * width, dtype=torch.bfloat16, device=numbers.device)
    if numbers.numel():
        columns = min(_NUMBERS, next_power_of_2(width))
        at_once = _NUMBERS // columns
        _parts_kernel[(cdiv(rows, at_once), cdiv(width, columns))](
            parts, numbers, rows, width, ROWS=at_once, COLUMNS=columns
        )
    return parts
