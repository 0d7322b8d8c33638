"""Adam and AdamW on a GPU: one kernel divides the gradient, updates moments and weights in float32, and writes the
rounded weights into the model's weights. It reads every number that changes between steps on the device. Weights and
moments may be stored in 8 or 16 bits, with the roundings of `state_storage`."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.tiles import cdiv
from megatron.core.optimizer.segments import StateSegment, StepInputs
from megatron.core.optimizer.state_storage import SCALE_BLOCK, Plain, Scaled, StateTensor, WithRemainder, smallest

_BLOCK = 1024
"""Elements that a program updates: a multiple of SCALE_BLOCK."""
_SCALED = {torch.float16: 1, torch.float8_e4m3fn: 2}
"""Types that have scales, as numbers that the kernel's `..._SCALED` arguments take."""


@triton.jit
def _adam_update(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    w, g, m, v, count, lr, divisor, decay,
    beta1, beta2, one_minus_beta1, one_minus_beta2, log_beta1, log_beta2, eps,
    DECOUPLED: tl.constexpr, DECAY_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Returns new weights and moments of a block, all float32."""
    t, rate = tl.load(count).to(tl.float64), tl.load(lr)
    pull = tl.load(decay) if DECAY_ON_DEVICE else tl.zeros_like(rate) + decay
    step_size = (rate / (1.0 - tl.exp(t * log_beta1))).to(tl.float32)
    root = tl.sqrt(1.0 - tl.exp(t * log_beta2)).to(tl.float32)
    g = tl.div_rn(g, tl.load(divisor).to(tl.float32) + tl.zeros_like(g))
    if DECOUPLED:
        w -= (rate * pull).to(tl.float32) * w
    else:
        g += pull.to(tl.float32) * w
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    w -= step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root + tl.zeros_like(v)) + eps)
    return w, m, v


@triton.jit
def _read(codes, scales, at, valid, SCALED: tl.constexpr, ROOT: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the numbers of a block in float32. SCALED: 0 without scales, 1 for float16, 2 for fp8 (as uint8)."""
    if SCALED == 2:
        x = tl.load(codes + at, mask=valid, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        x = tl.load(codes + at, mask=valid, other=0.0).to(tl.float32)
    if SCALED:
        x *= tl.load(scales + at // GROUP, mask=valid, other=1.0)
    if ROOT:
        x *= x
    return x


@triton.jit
def _rounded_to_e4m3(x):  # type: ignore[no-untyped-def]
    """Returns the nearest numbers of e4m3, still in float32: Triton's interpreter would round some of them wrongly."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    steps = (x + 24576.0) - 24576.0  # 1.5 * 2^14: sums are multiples of 2^-9, as the subnormal numbers are
    return tl.where(tl.abs(x) < 0.015625, steps, normal)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    codes, scales, at, valid, x, size, limit, least,
    SCALED: tl.constexpr, ROOT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the float32 numbers of a block."""
    if SCALED:
        if ROOT:
            x = tl.sqrt_rn(x)
        # Sizes are compared as integers: the bits of NaN are larger than those of any number.
        bits = tl.where(valid, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        largest = tl.max(tl.reshape(bits, (BLOCK // GROUP, GROUP)), 1).to(tl.float32, bitcast=True)
        ratio = tl.div_rn(largest, limit + tl.zeros_like(largest)).to(tl.int32, bitcast=True)
        scale = (ratio & 0x7F800000) + tl.where((ratio & 0x007FFFFF) != 0, 0x00800000, 0)
        scale = tl.maximum(scale, 0x00800000).to(tl.float32, bitcast=True)
        each = tl.reshape(tl.broadcast_to(scale[:, None], (BLOCK // GROUP, GROUP)), (BLOCK,))
        y = tl.div_rn(x, each)
        if ROOT:
            y = tl.where(x > 0.0, tl.maximum(y, least), y)
        if SCALED == 2:
            fp8 = _rounded_to_e4m3(y).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            is_number = (y.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
            tl.store(codes + at, tl.where(is_number, fp8, 0x7F).to(tl.uint8), mask=valid)
        else:
            tl.store(codes + at, y.to(tl.float16), mask=valid)
        block = tl.program_id(0).to(tl.int64) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + block, scale, mask=block * GROUP < size)
    else:
        tl.store(codes + at, x.to(codes.dtype.element_ty), mask=valid)


@triton.jit
def _adam_kernel(  # type: ignore[no-untyped-def]
    weights, weight_scales, gradients, exp_avgs, exp_avg_scales, exp_avg_sqs, exp_avg_sq_scales, rounded,
    count, lr, divisor, skip, decay, size,
    beta1, beta2, one_minus_beta1, one_minus_beta2, log_beta1, log_beta2, eps, limits_w, limits_m, limits_v, least,
    REMAINDER: tl.constexpr, WEIGHT_SCALED: tl.constexpr, M_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    ROUNDS: tl.constexpr, ROUNDS_AWAY: tl.constexpr, DECOUPLED: tl.constexpr, DECAY_ON_DEVICE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        valid = at < size
        if REMAINDER:
            high = tl.load(rounded + at, mask=valid, other=0).to(tl.int32) << 16
            w = (high + tl.load(weights + at, mask=valid, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
        else:
            w = _read(weights, weight_scales, at, valid, WEIGHT_SCALED, False, GROUP)
        g = tl.load(gradients + at, mask=valid, other=0.0).to(tl.float32)
        m = _read(exp_avgs, exp_avg_scales, at, valid, M_SCALED, False, GROUP)
        v = _read(exp_avg_sqs, exp_avg_sq_scales, at, valid, V_SCALED, V_SCALED != 0, GROUP)
        w, m, v = _adam_update(
            w, g, m, v, count, lr, divisor, decay,
            beta1, beta2, one_minus_beta1, one_minus_beta2, log_beta1, log_beta2, eps, DECOUPLED, DECAY_ON_DEVICE,
        )  # fmt: skip
        _write(exp_avgs, exp_avg_scales, at, valid, m, size, limits_m, 0.0, M_SCALED, False, GROUP, BLOCK)
        root = V_SCALED != 0
        _write(exp_avg_sqs, exp_avg_sq_scales, at, valid, v, size, limits_v, least, V_SCALED, root, GROUP, BLOCK)
        if ROUNDS_AWAY:
            bits, is_nan = w.to(tl.int32, bitcast=True), w != w
            tl.store(rounded + at, tl.where(is_nan, 0x7FC0, (bits + 0x8000) >> 16).to(tl.int16), mask=valid)
            if REMAINDER:
                tl.store(weights + at, tl.where(is_nan, 0, bits).to(tl.int16), mask=valid)
        elif ROUNDS:
            tl.store(rounded + at, w.to(rounded.dtype.element_ty), mask=valid)
        if not REMAINDER:
            _write(weights, weight_scales, at, valid, w, size, limits_w, 0.0, WEIGHT_SCALED, False, GROUP, BLOCK)


def adam_triton(
    rule: Any, segment: StateSegment, step: StepInputs, lr: Tensor, weight_decay: float | Tensor, rounds_away: bool
) -> None:
    """Does one step of `update_rules.Adam` for a segment with the main type float32. `lr`, and a decay that is a
    tensor, are float64 scalars on the device. `rounds_away`: the model's bfloat16 weights are rounded as in
    `WithRemainder`."""
    weights, model_weights, size = segment.weights, segment.model_weights, segment.gradient.numel()
    if not size:
        return
    remainder = weights.remainder if isinstance(weights, WithRemainder) else None
    rounds_away &= model_weights is not None and model_weights.dtype is torch.bfloat16
    assert remainder is None or rounds_away
    stored_weights = (remainder, None, 0, 0.0) if remainder is not None else _arguments(weights)
    first, second = (segment.moments[name] for name in rule.moments)
    (w, w_scales, w_scaled, w_limit), (m, m_scales, m_scaled, m_limit) = stored_weights, _arguments(first)
    v, v_scales, v_scaled, v_limit = _arguments(second)
    rounded = model_weights.view(torch.int16) if model_weights is not None and rounds_away else model_weights
    betas = rule.beta1, rule.beta2
    logarithms = (math.log(beta) if beta else -math.inf for beta in betas)
    least = smallest(second.codes.dtype) if isinstance(second, Scaled) else 0.0
    _adam_kernel[(cdiv(size, _BLOCK),)](
        w, w_scales, segment.gradient, m, m_scales, v, v_scales, rounded,
        step.count, lr, step.divisor, step.skip.view(torch.uint8), weight_decay, size,
        *betas, *(1.0 - beta for beta in betas), *logarithms, rule.eps, w_limit, m_limit, v_limit, least,
        REMAINDER=remainder is not None, WEIGHT_SCALED=w_scaled, M_SCALED=m_scaled, V_SCALED=v_scaled,
        ROUNDS=model_weights is not None, ROUNDS_AWAY=rounds_away, DECOUPLED=rule.decoupled,
        DECAY_ON_DEVICE=isinstance(weight_decay, Tensor), GROUP=SCALE_BLOCK, BLOCK=_BLOCK,
    )  # fmt: skip


def _arguments(state: StateTensor) -> tuple[Any, Any, int, float]:
    """Returns memory, scales, number of the type and largest number of a stored tensor, for the kernel."""
    if isinstance(state, Plain):
        return state.tensor, None, 0, 0.0
    assert isinstance(state, Scaled)
    dtype = state.codes.dtype
    codes = state.codes.view(torch.uint8) if dtype is torch.float8_e4m3fn else state.codes
    return codes, state.scales, _SCALED[dtype], torch.finfo(dtype).max
