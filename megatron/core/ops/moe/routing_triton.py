"""Routing on a GPU: the best scores of each token and their weights, and the parts of the logits' gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.moe.routing import Choice, RoutingRule, balance_sums, best, choose_experts, count_experts
from megatron.core.ops.sum_rows_triton import num_multiprocessors
from megatron.core.ops.tiles import cdiv, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_SCORES = 2048
"""Scores that one program compares."""
_MOST_EXPERTS = 2048
"""More scores of a token are sorted by torch."""
_PROGRAMS = 16
"""Programs on each multiprocessor, among which the tokens are divided whose scores are summed."""
_NUMBERS = 2048
"""Numbers that one program splits into parts."""


@triton.jit
def _softmax(score, valid):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """The softmax of each row's valid scores; 0 for others."""
    most = tl.max(tl.where(valid, score, float("-inf")), 1)
    power = tl.where(valid, tl.exp(score - most[:, None]), 0.0)
    return tl.where(valid, power / tl.sum(power, 1)[:, None], 0.0)


@triton.jit
def _best_kernel(  # type: ignore[no-untyped-def]
    experts, weights, sums, counts, scores, real, tokens, width, k, factor, blocks,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr, MAGNITUDE: tl.constexpr,
    LOWEST: tl.constexpr, WEIGHS: tl.constexpr, COUNTS: tl.constexpr, HAS_REAL: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, WIDTH)
    sum_part, count_part = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.int32)
    for block in range(blocks):
        token = (tl.program_id(0) * blocks + block).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        valid = (token < tokens)[:, None] & (expert < width)[None, :]
        score = tl.load(scores + token[:, None] * width + expert[None, :], mask=valid, other=0.0).to(WIDE)
        # Whole numbers in the order of the scores: -0.0 equals 0.0, and all NaNs are equal and largest, as for
        # torch.sort.
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
        taken = valid & (key == LOWEST)
        if WEIGHS:  # softmax of the chosen scores
            weight = _softmax(score, taken) * factor
            tl.store(weights + token[:, None] * k + place, weight, mask=taken)
        if COUNTS:
            counted = valid
            if HAS_REAL:
                counted &= tl.load(real + token, mask=token < tokens, other=0)[:, None] != 0
            sum_part += tl.sum(tl.where(counted, _softmax(score, valid), 0.0), 0)
            count_part += tl.sum((taken & counted).to(tl.int32), 0)
    if COUNTS:
        at = tl.program_id(0) * width + expert
        tl.store(sums + at, sum_part, mask=expert < width)
        tl.store(counts + at, count_part, mask=expert < width)


@triton.jit
def _choice_backward_kernel(  # type: ignore[no-untyped-def]
    gradient, weights_gradient, sums_gradient, weights, experts, logits, real, tokens, width, k, factor,
    OF_WEIGHTS: tl.constexpr, OF_SUMS: tl.constexpr, HAS_REAL: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDTH)
    valid = (token < tokens)[:, None] & (expert < width)[None, :]
    change = tl.zeros((TOKENS, WIDTH), tl.float32)
    if OF_WEIGHTS:
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
    if OF_SUMS:
        score = tl.load(logits + token[:, None] * width + expert[None, :], mask=valid, other=0.0).to(tl.float32)
        counted = valid
        if HAS_REAL:
            counted &= tl.load(real + token, mask=token < tokens, other=0)[:, None] != 0
        part = tl.where(counted, _softmax(score, valid), 0.0)
        of_sum = tl.load(sums_gradient + expert, mask=expert < width, other=0.0)[None, :]
        change += part * (of_sum - tl.sum(part * of_sum, 1)[:, None])
    tl.store(gradient + token[:, None] * width + expert[None, :], change.to(gradient.dtype.element_ty), mask=valid)


def choose_experts_triton(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes `routing.choose_experts`; the experts are the same to the bit. One kernel computes the softmax of the
    best logits, torch other rules and float64."""
    if not _has_kernel(logits, rule, bias) or given is not None:
        return choose_experts(logits, rule, bias, given, best_triton)
    return _Choice.apply(logits, rule.topk, rule.factor or 1.0, False, None)[:2]


def choose_and_count_triton(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, real: Tensor | None = None
) -> Choice:
    """Computes `routing.choose_and_count`. Where one kernel chooses experts, it also sums and counts, and backward
    computes the whole gradient of the logits at once; torch computes other sums and counts."""
    if not _has_kernel(logits, rule, bias) or not logits.numel():
        experts, weights = choose_experts_triton(logits, rule, bias)
        sums = balance_sums(logits, rule.score_function, real)
        return Choice(experts, weights, sums, count_experts(experts, logits.shape[1], real))
    return Choice(*_Choice.apply(logits, rule.topk, rule.factor or 1.0, True, real))


def _has_kernel(logits: Tensor, rule: RoutingRule, bias: Tensor | None) -> bool:
    late_softmax = rule.score_function == "softmax" and not rule.scores_first
    plain = late_softmax and not rule.renormalises and rule.num_groups is None and bias is None
    return plain and logits.shape[1] <= _MOST_EXPERTS and logits.dtype is not torch.float64


class _Choice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, logits: Tensor, count: int, factor: float, counts: bool, real: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        chosen = _best(logits, count, factor, counts, real)
        ctx.save_for_backward(chosen.experts, chosen.weights, *((logits, real) if counts else (None, None)))
        ctx.mark_non_differentiable(*(whole for whole in (chosen.experts, chosen.counts) if whole is not None))
        ctx.set_materialize_grads(False)  # no zeros for the experts
        ctx.dtype, ctx.width, ctx.factor = logits.dtype, logits.shape[1], factor
        return chosen.experts, chosen.weights, chosen.score_sums, chosen.counts

    @staticmethod
    @once_differentiable
    def backward(
        ctx: AutogradContext, unused: None, of_weights: Tensor | None, of_sums: Tensor | None, unused_too: None
    ) -> tuple[Tensor | None, ...]:
        if of_weights is None and of_sums is None:
            return None, None, None, None, None
        experts, weights, logits, real = ctx.saved_tensors
        gradient = torch.empty(experts.shape[0], ctx.width, dtype=ctx.dtype, device=experts.device)
        if gradient.numel():
            grid, tile = _tiles(*gradient.shape)
            given = [None if given is None else given.contiguous() for given in (of_weights, of_sums)]
            read = [None if given is None else given.contiguous() for given in (logits, real)]
            _choice_backward_kernel[grid](
                gradient, *given, weights, experts, *read, *gradient.shape, experts.shape[1], ctx.factor,
                OF_WEIGHTS=of_weights is not None, OF_SUMS=of_sums is not None, HAS_REAL=real is not None, **tile,
            )  # fmt: skip
        return gradient, None, None, None, None


def _tiles(tokens: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    columns = next_power_of_2(width)
    at_once = max(1, min(_SCORES // columns, 256))
    return (cdiv(tokens, at_once),), {"TOKENS": at_once, "WIDTH": columns}


def best_triton(scores: Tensor, count: int) -> Tensor:
    """Computes `routing.best`, to the bit. Torch sorts whole numbers and more than 2048 scores of a token."""
    width = scores.shape[-1]
    if scores.dim() != 2 or width > _MOST_EXPERTS or not scores.dtype.is_floating_point:
        return best(scores, count)
    return _best(scores.detach(), count, None).experts


def _best(scores: Tensor, count: int, factor: float | None, counts: bool = False, real: Tensor | None = None) -> Choice:
    """Returns the experts and, with a factor, their weights; with `counts` also the sums of softmax and the counts, of
    the `real` tokens."""
    (tokens, width), scores = scores.shape, scores.contiguous()
    count = min(count, width)
    experts = torch.empty(tokens, count, dtype=torch.int64, device=scores.device)
    weights = torch.empty(tokens, count if factor is not None else 0, dtype=torch.float32, device=scores.device)
    (programs,), tile = _tiles(tokens, width)
    sums = numbers = None
    blocks = 1
    if counts:  # few sums for each program's blocks of tokens, but enough programs
        blocks = max(1, programs // (_PROGRAMS * num_multiprocessors(scores.device)))
        programs = cdiv(programs, blocks)
        sums = torch.empty(programs, width, dtype=torch.float32, device=scores.device)
        numbers = torch.empty(programs, width, dtype=torch.int32, device=scores.device)
    if experts.numel():
        wide, key, bits = (tl.float64, tl.int64, 64) if scores.dtype is torch.float64 else (tl.float32, tl.int32, 32)
        _best_kernel[(programs,)](
            experts, weights, sums, numbers, scores, None if real is None else real.contiguous(), tokens, width, count,
            1.0 if factor is None else factor, blocks, **tile, WIDE=wide, KEY=key, MAGNITUDE=2 ** (bits - 1) - 1,
            LOWEST=-(2 ** (bits - 1)), WEIGHS=factor is not None, COUNTS=counts, HAS_REAL=real is not None,
        )  # fmt: skip
    if sums is None or numbers is None:
        return Choice(experts, weights)
    return Choice(experts, weights, sums.sum(0), numbers.sum(0))


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
