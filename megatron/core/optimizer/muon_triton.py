"""Muon's updates of momentum and weights on a GPU, in one pass each, and what comes first of orthogonalisation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.tiles import cdiv
from megatron.core.optimizer.muon_matrices import Runs
from megatron.core.optimizer.newton_schulz import EPS
from megatron.core.optimizer.segments import StepInputs

_BLOCK = 1024
"""Elements that a program of the updates computes."""
_PARTS, _PART_BLOCK = 512, 2048
"""Parts of a matrix whose squares are summed apart, and the elements that a program reads at once. With 8 warps a
multiprocessor of an H200 runs four programs, so all parts run at the same time."""


@triton.jit
def _places(block, n, count, length, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns for a block of matrix n, which has `count` runs: whether its elements exist, where they are, and where
    they are without the gaps between runs."""
    blocks = tl.cdiv(length, BLOCK)
    run = n * count + block // blocks
    inside = (tl.full((), 0, tl.int64) + block % blocks) * BLOCK + tl.arange(0, BLOCK)
    return inside < length, run * stride + inside, run * length + inside


@triton.jit
def _momentum_kernel(  # type: ignore[no-untyped-def]
    directions, squares, momenta, gradients, weights, divisor, skip, decay, count, length, stride, one_minus_beta,
    NESTEROV: tl.constexpr, COUPLED: tl.constexpr, DECAY_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part, parts, n = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    keeps, scale = tl.load(skip) == 0, tl.load(divisor).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(part, count * tl.cdiv(length, BLOCK), parts):
        valid, at, dense = _places(block, n, count, length, stride, BLOCK)
        before = tl.load(momenta + at, mask=valid, other=0.0)
        gradient = tl.load(gradients + at, mask=valid, other=0.0).to(tl.float32)
        gradient = tl.div_rn(gradient, scale + tl.zeros_like(gradient))
        if COUPLED:
            pull = tl.load(decay).to(tl.float32) if DECAY_ON_DEVICE else decay
            gradient += pull * tl.load(weights + at, mask=valid, other=0.0)
        momentum = before + one_minus_beta * (gradient - before)
        direction = momentum
        if NESTEROV:
            direction = momentum + one_minus_beta * (gradient - momentum)
        tl.store(directions + dense, direction, mask=valid)
        if keeps:
            tl.store(momenta + at, momentum, mask=valid)
        total += tl.where(valid, direction * direction, 0.0)
    tl.store(squares + n * parts + part, tl.sum(total, 0))


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
    runs: Runs | None = None,
) -> tuple[Tensor, Tensor]:
    """Updates the momentum in place, unless `step.skip` is set. Returns the tensor to orthogonalise, flat and without
    gaps, and the sums of the squares of parts of each matrix, [matrices, parts], added in a fixed order. All tensors
    are flat and float32. With `runs` only those elements are read and written."""
    runs = runs or Runs(1, 0, 1, momentum.numel(), momentum.numel())
    directions = momentum.new_empty(runs.count * runs.length)
    squares = momentum.new_empty(runs.matrices, _PARTS)
    _momentum_kernel[(_PARTS, runs.matrices)](
        directions, squares, momentum[runs.first :], gradients[runs.first :], weights[runs.first :], step.divisor,
        step.skip, weight_decay, runs.count // runs.matrices, runs.length, runs.stride, 1.0 - beta,
        NESTEROV=nesterov, COUPLED=not decoupled, DECAY_ON_DEVICE=isinstance(weight_decay, Tensor), BLOCK=_PART_BLOCK,
        num_warps=8,
    )  # fmt: skip
    return directions, squares


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


def round_normalized(
    matrices: Tensor, output: Tensor, scale: float, margin: float, squares: Tensor | None = None
) -> None:
    """Writes `scale` times matrices [n, rows, columns], each divided by `margin` times its Frobenius norm, into
    `output`. `squares`: what `update_momentum_triton` returned. Without it squares are added here, in a fixed order."""
    n, size = len(matrices), matrices[0].numel()
    matrices = matrices.contiguous()
    if squares is None:
        squares = matrices.new_empty(n, _PARTS)
        _squared_momentum_kernel[(_PARTS, n)](squares, matrices, size, PARTS=_PARTS, BLOCK=_PART_BLOCK, num_warps=8)
    _rounded_momentum_kernel[(cdiv(size, 2 * _PART_BLOCK), n)](
        output, matrices, squares, size, scale, margin, EPS, PARTS=_PARTS, BLOCK=2 * _PART_BLOCK, num_warps=8
    )


@triton.jit
def _two_part_product_kernel(high, low, values, added, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
    _two_part_product_kernel[(cdiv(size, _BLOCK),)](added, rest, product, added, size, BLOCK=_BLOCK)
    return added, rest


@triton.jit
def _weights_kernel(  # type: ignore[no-untyped-def]
    weights, rounded, updates, lr, skip, decay, count, length, stride,
    DECOUPLED: tl.constexpr, DECAY_ON_DEVICE: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) == 0:
        valid, at, dense = _places(tl.program_id(0).to(tl.int64), 0, count, length, stride, BLOCK)
        w = tl.load(weights + at, mask=valid)
        rate = tl.load(lr)
        if DECOUPLED:
            pull = tl.load(decay) if DECAY_ON_DEVICE else tl.zeros_like(rate) + decay
            w *= (1.0 - rate * pull).to(tl.float32)
        w -= rate.to(tl.float32) * tl.load(updates + dense, mask=valid).to(tl.float32)
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
    runs: Runs | None = None,
) -> None:
    """Updates flat float32 weights in place and rounds them into the model's, unless `step.skip` is set. Updates may be
    narrower. `lr`, and a decay that is a tensor, are float64 scalars on the device. With `runs` only those elements are
    updated, from updates without gaps."""
    if not updates.numel():
        return
    runs = runs or Runs(1, 0, 1, weights.numel(), weights.numel())
    _weights_kernel[(runs.count * cdiv(runs.length, _BLOCK),)](
        weights[runs.first :], (weights if model_weights is None else model_weights)[runs.first :], updates, lr,
        step.skip, weight_decay, runs.count, runs.length, runs.stride, DECOUPLED=decoupled,
        DECAY_ON_DEVICE=isinstance(weight_decay, Tensor), ROUNDS=model_weights is not None, BLOCK=_BLOCK,
    )  # fmt: skip
