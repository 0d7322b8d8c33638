"""Outputs of routed and shared experts, and gradients of their input, added on a GPU in one pass each."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.moe.shared import ReadInput, add_shared, read_input, sum_gradients
from megatron.core.ops.tiles import cdiv, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_WIDEST = 16384
"""Channels of a row that fit into one program's registers."""


@triton.jit
def _add_shared_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    output, routed, shared, logits, residual, rows, width,
    HAS_GATE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    valid = (row < rows)[:, None] & (column < width)
    at = row[:, None] * width + column
    value = tl.load(shared + at, mask=valid).to(tl.float32)
    if HAS_GATE:
        value *= tl.sigmoid(tl.load(logits + row, mask=row < rows, other=0.0).to(tl.float32))[:, None]
    value += tl.load(routed + at, mask=valid).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=valid).to(tl.float32)
    tl.store(output + at, value.to(output.dtype.element_ty), mask=valid)


@triton.jit
def _add_shared_backward_kernel(  # type: ignore[no-untyped-def]
    shared_gradient, logits_gradient, gradient, shared, logits, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    valid = (row < rows)[:, None] & (column < width)
    at = row[:, None] * width + column
    gate = tl.sigmoid(tl.load(logits + row, mask=row < rows, other=0.0).to(tl.float32))
    dy = tl.load(gradient + at, mask=valid, other=0.0).to(tl.float32)
    value = tl.load(shared + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(shared_gradient + at, (dy * gate[:, None]).to(shared_gradient.dtype.element_ty), mask=valid)
    of_logit = tl.sum(dy * value, 1) * gate * (1.0 - gate)
    tl.store(logits_gradient + row, of_logit.to(logits_gradient.dtype.element_ty), mask=row < rows)


def add_shared_triton(
    routed: Tensor, shared: Tensor | None, gate_logits: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Computes `shared.add_shared` with one rounding. Sums of two tensors, float64, tensors of several types, and rows
    of more than 16,384 channels use the reference."""
    types = {tensor.dtype for tensor in (routed, shared, residual) if tensor is not None}
    takes = len(types) == 1 and torch.float64 not in types and routed.shape[1] <= _WIDEST and routed.numel() > 0
    if not takes or shared is None or (gate_logits is None and residual is None):
        return add_shared(routed, shared, gate_logits, residual)
    return _AddShared.apply(routed, shared, gate_logits, residual)


class _AddShared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, routed: Tensor, shared: Tensor, logits: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        ctx.has_gate, ctx.has_residual = logits is not None, residual is not None
        if logits is not None:
            ctx.save_for_backward(shared, logits)
        output, (grid, tile) = torch.empty(routed.shape, dtype=routed.dtype, device=routed.device), _tiles(routed)
        read = [None if tensor is None else tensor.contiguous() for tensor in (routed, shared, logits, residual)]
        _add_shared_kernel[grid](
            output, *read, *routed.shape, HAS_GATE=ctx.has_gate, HAS_RESIDUAL=ctx.has_residual, **tile
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shared_gradient, logits_gradient = gradient, None
        if ctx.has_gate:
            shared, logits = (tensor.contiguous() for tensor in ctx.saved_tensors)
            shared_gradient, logits_gradient = torch.empty_like(shared), torch.empty_like(logits)
            grid, tile = _tiles(shared)
            _add_shared_backward_kernel[grid](
                shared_gradient, logits_gradient, gradient.contiguous(), shared, logits, *shared.shape, **tile
            )
        return gradient, shared_gradient, logits_gradient, gradient if ctx.has_residual else None


def _tiles(outputs: Tensor) -> tuple[tuple[int], dict[str, int]]:
    rows, width = outputs.shape
    channels = next_power_of_2(width)
    at_once = max(1, 2048 // channels)
    return (cdiv(rows, at_once),), {"ROWS": at_once, "WIDTH": channels, "num_warps": max(4, min(16, channels // 512))}


@triton.jit
def _sum_gradients_kernel(  # type: ignore[no-untyped-def]
    total, first, second, third, logits_gradient, weight, rows, width,
    SUMMANDS: tl.constexpr, HAS_GATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    valid = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    value = tl.load(first + at, mask=valid).to(tl.float32)
    if SUMMANDS > 1:
        value += tl.load(second + at, mask=valid).to(tl.float32)
    if SUMMANDS > 2:
        value += tl.load(third + at, mask=valid).to(tl.float32)
    if HAS_GATE:
        of_logit = tl.load(logits_gradient + row, mask=row < rows, other=0.0).to(tl.float32)
        factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        value += of_logit[:, None] * factor[None, :]
    tl.store(total + at, value.to(total.dtype.element_ty), mask=valid)


def sum_gradients_triton(gradients: Sequence[Tensor], logits_gradient: Tensor | None, weight: Tensor | None) -> Tensor:
    """Computes `shared.sum_gradients` with one rounding. Float64, a single summand, logits alone, and rows of more than
    16,384 channels use the reference."""
    has_gate = logits_gradient is not None
    takes = len(gradients) in (range(1, 4) if has_gate else range(2, 4))
    if not takes or gradients[0].dtype is torch.float64 or gradients[0].shape[1] > _WIDEST or not gradients[0].numel():
        return sum_gradients(gradients, logits_gradient, weight)
    read = [gradient.contiguous() for gradient in gradients]
    first, (grid, tile) = read[0], _tiles(read[0])
    total = torch.empty_like(first)
    gate = (None, None) if logits_gradient is None or weight is None else (logits_gradient.contiguous(), weight)
    _sum_gradients_kernel[grid](
        total, *read, *[None] * (3 - len(read)), *gate, *first.shape, SUMMANDS=len(read), HAS_GATE=has_gate, **tile
    )
    return total


def read_input_triton(hidden: Tensor, gate_weight: Tensor | None = None) -> ReadInput:
    """Computes `shared.read_input`."""
    return read_input(hidden, gate_weight, sum_gradients_triton)
