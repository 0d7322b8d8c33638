"""Muon's updates of momentum and weights on a GPU, in one pass each, and what comes first of orthogonalisation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.tiles import cdiv
from megatron.core.optimizer.newton_schulz import EPS
from megatron.core.optimizer.segments import StepInputs

_BLOCK = 1024
"""Elements that a program of the updates computes."""


@triton.jit
def _momentum_kernel(  # type: ignore[no-untyped-def]
    directions, momenta, gradients, weights, divisor, skip, decay, size, one_minus_beta,
    NESTEROV: tl.constexpr, COUPLED: tl.constexpr, DECAY_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = at < size
    before = tl.load(momenta + at, mask=valid, other=0.0)
    gradient = tl.load(gradients + at, mask=valid, other=0.0).to(tl.float32)
    gradient = tl.div_rn(gradient, tl.load(divisor).to(tl.float32) + tl.zeros_like(gradient))
    if COUPLED:
        pull = tl.load(decay).to(tl.float32) if DECAY_ON_DEVICE else decay
        gradient += pull * tl.load(weights + at, mask=valid, other=0.0)
    momentum = before + one_minus_beta * (gradient - before)
    direction = momentum
    if NESTEROV:
        direction = momentum + one_minus_beta * (gradient - momentum)
    tl.store(directions + at, direction, mask=valid)
    if tl.load(skip) == 0:
        tl.store(momenta + at, momentum, mask=valid)


def update_momentum_triton(
    momentum: Tensor,
    gradients: Tensor,
    weights: Tensor,
    step: StepInputs,
    weight_decay: float | Tensor,
    *,
    beta: float,
    nesterov: bool,
    decoupled: bool,
) -> Tensor:
    """Updates the momentum in place, unless `step.skip` is set, and returns the tensor to orthogonalise. All tensors
    are flat and float32."""
    directions, size = torch.empty_like(momentum), momentum.numel()
    _momentum_kernel[(cdiv(size, _BLOCK),)](
        directions, momentum, gradients, weights, step.divisor, step.skip, weight_decay, size, 1.0 - beta,
        NESTEROV=nesterov, COUPLED=not decoupled, DECAY_ON_DEVICE=isinstance(weight_decay, Tensor), BLOCK=_BLOCK,
    )  # fmt: skip
    return directions


_PARTS, _PART_BLOCK = 512, 4096
"""Parts of a matrix whose squares are summed apart, and the elements that a program reads at once."""


@triton.jit
def _squared_momentum_kernel(sums, matrices, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    part, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(part * BLOCK, size, PARTS * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(matrices + n * size + at, mask=at < size, other=0.0)
        total += x * x
    tl.store(sums + n * PARTS + part, tl.sum(total, 0))


@triton.jit
def _rounded_momentum_kernel(  # type: ignore[no-untyped-def]
    output, matrices, sums, size, scale, margin, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(1).to(tl.int64)
    squares = tl.sum(tl.load(sums + n * PARTS + tl.arange(0, PARTS)), 0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(matrices + n * size + at, mask=at < size)
    x *= scale / (tl.sqrt(squares) * margin + eps)
    tl.store(output + n * size + at, x.to(output.dtype.element_ty), mask=at < size)


def round_normalized(matrices: Tensor, output: Tensor, scale: float, margin: float) -> None:
    """Writes `scale` times matrices [n, rows, columns], each divided by `margin` times its Frobenius norm, into
    `output`. Sums are added in a fixed order."""
    n, size = len(matrices), matrices[0].numel()
    matrices = matrices.contiguous()
    sums = matrices.new_empty(n, _PARTS)
    _squared_momentum_kernel[(_PARTS, n)](sums, matrices, size, PARTS=_PARTS, BLOCK=_PART_BLOCK, num_warps=8)
    _rounded_momentum_kernel[(cdiv(size, _PART_BLOCK), n)](
        output, matrices, sums, size, scale, margin, EPS, PARTS=_PARTS, BLOCK=_PART_BLOCK, num_warps=8
    )


@triton.jit
def _two_parts_kernel(high, low, values, added, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = at < size
    total = tl.load(values + at, mask=valid) + tl.load(added + at, mask=valid).to(tl.float32)
    rounded = total.to(high.dtype.element_ty)
    tl.store(high + at, rounded, mask=valid)
    tl.store(low + at, (total - rounded.to(tl.float32)).to(low.dtype.element_ty), mask=valid)


def product_in_two_parts(left: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Returns left @ (high + low) of float16 matrices [n, r, r] in float16, and what its rounding left out. `low` is so
    small that its product needs no second part."""
    if left.device.type == "cuda":
        product = torch.bmm(left, high, out_dtype=torch.float32)
    else:
        product = torch.bmm(left.float(), high.float())
    added = torch.bmm(left, low)
    size, rest = added.numel(), torch.empty_like(added)
    _two_parts_kernel[(cdiv(size, _BLOCK),)](added, rest, product, added, size, BLOCK=_BLOCK)
    return added, rest


@triton.jit
def _weights_kernel(  # type: ignore[no-untyped-def]
    weights, rounded, updates, lr, skip, decay, size,
    DECOUPLED: tl.constexpr, DECAY_ON_DEVICE: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        valid = at < size
        w = tl.load(weights + at, mask=valid)
        rate = tl.load(lr)
        if DECOUPLED:
            pull = tl.load(decay) if DECAY_ON_DEVICE else tl.zeros_like(rate) + decay
            w *= (1.0 - rate * pull).to(tl.float32)
        w -= rate.to(tl.float32) * tl.load(updates + at, mask=valid).to(tl.float32)
        tl.store(weights + at, w, mask=valid)
        if ROUNDS:
            tl.store(rounded + at, w.to(rounded.dtype.element_ty), mask=valid)


def update_weights_triton(
    weights: Tensor,
    model_weights: Tensor | None,
    updates: Tensor,
    step: StepInputs,
    lr: Tensor,
    weight_decay: float | Tensor,
    decoupled: bool,
) -> None:
    """Updates flat float32 weights in place and rounds them into the model's, unless `step.skip` is set. Updates may be
    narrower. `lr`, and a decay that is a tensor, are float64 scalars on the device."""
    size = weights.numel()
    if not size:
        return
    _weights_kernel[(cdiv(size, _BLOCK),)](
        weights, weights if model_weights is None else model_weights, updates, lr, step.skip, weight_decay, size,
        DECOUPLED=decoupled, DECAY_ON_DEVICE=isinstance(weight_decay, Tensor), ROUNDS=model_weights is not None,
        BLOCK=_BLOCK,
    )  # fmt: skip
