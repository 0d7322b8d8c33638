"""Muon's work on a GPU: products of matrices whose result is symmetric, and the updates of momentum and weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.tiles import cdiv
from megatron.core.optimizer.segments import StepInputs

_BLOCK = 1024
"""Elements that a program of the updates computes."""


@triton.jit
def _symmetric_product_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    output, left, right, added, size, inner, left_n, left_row, left_k, right_n, right_row, right_k, alpha, beta, gamma,
    ADDS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Computes a tile [ROWS, ROWS] of the lower triangle, and writes it and its mirror image."""
    pair, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Tiles of the triangle are numbered by rows: row i has i + 1 of them.
    i = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > pair, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= pair, i + 1, i)
    j = pair - i * (i + 1) // 2
    row, column = i * ROWS + tl.arange(0, ROWS), j * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, INNER)
    left_at = left + n * left_n + row[:, None].to(tl.int64) * left_row + k[None, :] * left_k
    right_at = right + n * right_n + column[None, :].to(tl.int64) * right_row + k[:, None] * right_k
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for begin in range(0, inner, INNER):
        inside = begin + k < inner
        a = tl.load(left_at, mask=(row < size)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right_at, mask=(column < size)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
        left_at += INNER * left_k
        right_at += INNER * right_k
    total *= alpha
    present = (row < size)[:, None] & (column < size)[None, :]
    at = n * size * size + row[:, None].to(tl.int64) * size + column[None, :]
    if ADDS:
        total += beta * tl.load(added + at, mask=present, other=0.0).to(tl.float32)
        total += tl.where(row[:, None] == column[None, :], gamma, 0.0)
    result = total.to(output.dtype.element_ty)
    tl.store(output + at, result, mask=present & (row[:, None] >= column[None, :]))
    mirrored = n * size * size + column[:, None].to(tl.int64) * size + row[None, :]
    there = (column < size)[:, None] & (row < size)[None, :]
    tl.store(output + mirrored, tl.trans(result), mask=there & (column[:, None] < row[None, :]))


def symmetric_product_triton(
    left: Tensor, right: Tensor, alpha: float = 1.0, added: Tensor | None = None, beta: float = 0.0, gamma: float = 0.0
) -> Tensor:
    """Returns alpha left @ right^T + beta added + gamma I for [n, r, k] matrices whose product is symmetric, computed
    from its lower triangle: half the work of a product. `added` is symmetric. Sums are in float32."""
    n, size, inner = left.shape
    output = left.new_empty(n, size, size)
    rows = 128 if size >= 128 else max(16, triton.next_power_of_2(size))
    tiles = cdiv(size, rows)
    _symmetric_product_kernel[(tiles * (tiles + 1) // 2, n)](
        output, left, right, output if added is None else added, size, inner, *left.stride(), *right.stride(),
        alpha, beta, gamma,
        ADDS=added is not None, ROWS=rows, INNER=64, num_warps=8, num_stages=4,
    )  # fmt: skip
    return output


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
    """Updates flat float32 weights in place and rounds them into the model's, unless `step.skip` is set. `lr`, and a
    decay that is a tensor, are float64 scalars on the device."""
    size = weights.numel()
    _weights_kernel[(cdiv(size, _BLOCK),)](
        weights, weights if model_weights is None else model_weights, updates, lr, step.skip, weight_decay, size,
        DECOUPLED=decoupled, DECAY_ON_DEVICE=isinstance(weight_decay, Tensor), ROUNDS=model_weights is not None,
        BLOCK=_BLOCK,
    )  # fmt: skip
