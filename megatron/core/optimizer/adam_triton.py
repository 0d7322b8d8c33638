"""Adam and AdamW on a GPU: one kernel divides the gradient, updates moments and weights, and writes the rounded weights
into the model's weights. The kernel reads every number that changes between steps on the device."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.tiles import cdiv
from megatron.core.optimizer.segments import StepInputs

_BLOCK = 1024
"""Elements that a program updates."""


@triton.jit
def adam_update(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
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
def _adam_kernel(  # type: ignore[no-untyped-def]
    weights, gradients, exp_avgs, exp_avg_sqs, rounded, count, lr, divisor, skip, decay, size,
    beta1, beta2, one_minus_beta1, one_minus_beta2, log_beta1, log_beta2, eps,
    DECOUPLED: tl.constexpr, DECAY_ON_DEVICE: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        valid = at < size
        w = tl.load(weights + at, mask=valid)
        g = tl.load(gradients + at, mask=valid)
        m = tl.load(exp_avgs + at, mask=valid)
        v = tl.load(exp_avg_sqs + at, mask=valid)
        w, m, v = adam_update(
            w, g, m, v, count, lr, divisor, decay,
            beta1, beta2, one_minus_beta1, one_minus_beta2, log_beta1, log_beta2, eps, DECOUPLED, DECAY_ON_DEVICE,
        )  # fmt: skip
        tl.store(weights + at, w, mask=valid)
        tl.store(exp_avgs + at, m, mask=valid)
        tl.store(exp_avg_sqs + at, v, mask=valid)
        if ROUNDS:
            tl.store(rounded + at, w.to(rounded.dtype.element_ty), mask=valid)


def adam_triton(
    weights: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    model_weights: Tensor | None,
    step: StepInputs,
    lr: Tensor,
    weight_decay: float | Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    decoupled: bool,
) -> None:
    """Does one step of `update_rules.Adam` for a flat segment. All tensors are float32, except `model_weights`, which
    get the new weights in their own type. `lr`, and a decay that is a tensor, are float64 scalars on the device."""
    size = weights.numel()
    if not size:
        return
    given = [weights, gradients, exp_avg, exp_avg_sq, *(() if model_weights is None else (model_weights,))]
    assert all(t.is_contiguous() and t.numel() == size for t in given)
    on_device = isinstance(weight_decay, Tensor)
    _adam_kernel[(cdiv(size, _BLOCK),)](
        *given[:4], model_weights, step.count, lr, step.divisor, step.skip.view(torch.uint8), weight_decay, size,
        *constants(betas, eps),
        DECOUPLED=decoupled, DECAY_ON_DEVICE=on_device, ROUNDS=model_weights is not None, BLOCK=_BLOCK,
    )  # fmt: skip


def constants(betas: tuple[float, float], eps: float) -> tuple[float, ...]:
    """Returns the numbers of `adam_update` that do not change: betas, 1 - betas, logarithms of betas, eps."""
    return (*betas, *(1.0 - beta for beta in betas), *(math.log(beta) if beta else -math.inf for beta in betas), eps)
