"""LayerNorm and RMSNorm on a GPU: one kernel in forward and one in backward, which also adds a residual's gradient.

Forward keeps the input and one or two float32 numbers for each row. In backward each program sums its rows' part of
the gradients of weight and bias in registers and writes it once; a second kernel sums these parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.fp8.quantize import note_largest
from megatron.core.ops.fp8.quantize_triton import bits_of_size, raise_largest
from megatron.core.ops.norm import layer_norm_with_residual, rms_norm_with_residual
from megatron.core.ops.sum_rows_triton import num_multiprocessors, sum_rows_triton
from megatron.core.ops.tiles import cdiv, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_WIDEST = 16384
"""Channels of a row that fit into one program's registers."""
_PROGRAMS = 4
"""Programs of backward for each multiprocessor."""


@triton.jit
def _norm_forward_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    output, largest, means, inverses, inputs, weight, bias, rows, width, stride, epsilon,
    CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    NOTES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # NOTES: raises `largest` to the largest absolute value of the output, from which fp8 computes its scale.
    if NOTES:
        before = tl.load(largest)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = column < width
    valid = (row < rows)[:, None] & inside[None, :]
    x = tl.load(inputs + row[:, None] * stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    if CENTERED:
        mean = tl.sum(x, 1) / width
        x = tl.where(inside[None, :], x - mean[:, None], 0.0)
        tl.store(means + row, mean, mask=row < rows)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / width + epsilon)
    tl.store(inverses + row, inverse, mask=row < rows)
    y = x * inverse[:, None]
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            factor += 1.0
        y *= factor[None, :]
    if HAS_BIAS:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    rounded = y.to(output.dtype.element_ty)
    tl.store(output + row[:, None] * width + column[None, :], rounded, mask=valid)
    if NOTES:
        raise_largest(largest, before, tl.max(tl.where(valid, bits_of_size(rounded.to(tl.float32)), 0), 1))


@triton.jit
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    inputs_gradient, largest, weight_parts, bias_parts, gradient, residual_gradient, inputs, weight, means, inverses,
    rows, width, gradient_stride, residual_stride, stride,
    CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, SUMS_WEIGHT: tl.constexpr, SUMS_BIAS: tl.constexpr,
    ADDS_RESIDUAL: tl.constexpr, ZERO_CENTERED: tl.constexpr, NOTES: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    inside = column < width
    weight_part = tl.zeros((ROWS, WIDTH), tl.float32)
    bias_part = tl.zeros((ROWS, WIDTH), tl.float32)
    size = tl.zeros((ROWS,), tl.int32)
    if NOTES:
        before = tl.load(largest)
    factor = tl.full((WIDTH,), 1.0, tl.float32)
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            factor += 1.0
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        valid = (row < rows)[:, None] & inside[None, :]
        x = tl.load(inputs + row[:, None] * stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        at = gradient + row[:, None] * gradient_stride + column[None, :]
        dy = tl.load(at, mask=valid, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row, mask=row < rows, other=0.0)
        if CENTERED:
            x -= tl.load(means + row, mask=row < rows, other=0.0)[:, None]
        normed = x * inverse[:, None]
        if SUMS_WEIGHT:
            weight_part += dy * normed
        if SUMS_BIAS:
            bias_part += dy
        dy *= factor[None, :]
        dx = dy - normed * (tl.sum(dy * normed, 1) / width)[:, None]
        if CENTERED:
            dx -= (tl.sum(dy, 1) / width)[:, None]
        dx *= inverse[:, None]
        if ADDS_RESIDUAL:
            at = residual_gradient + row[:, None] * residual_stride + column[None, :]
            dx += tl.load(at, mask=valid, other=0.0).to(tl.float32)
        at = inputs_gradient + row[:, None] * width + column[None, :]
        rounded = dx.to(inputs_gradient.dtype.element_ty)
        tl.store(at, rounded, mask=valid)
        if NOTES:
            size = tl.maximum(size, tl.max(tl.where(valid, bits_of_size(rounded.to(tl.float32)), 0), 1))
    if NOTES:
        raise_largest(largest, before, size)
    at = tl.program_id(0) * width + column
    if SUMS_WEIGHT:
        tl.store(weight_parts + at, tl.sum(weight_part, 0), mask=inside)
    if SUMS_BIAS:
        tl.store(bias_parts + at, tl.sum(bias_part, 0), mask=inside)


def rms_norm_triton(inputs: Tensor, weight: Tensor | None, epsilon: float, zero_centered: bool = False) -> Tensor:
    """Computes `norm.rms_norm` in one kernel. Float64 and rows of more than 16,384 channels use the reference."""
    return rms_norm_with_residual_triton(inputs, weight, epsilon, zero_centered)[0]


def layer_norm_triton(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, zero_centered: bool = False
) -> Tensor:
    """Computes `norm.layer_norm` in one kernel. Float64 and rows of more than 16,384 channels use the reference."""
    return layer_norm_with_residual_triton(inputs, weight, bias, epsilon, zero_centered)[0]


def rms_norm_with_residual_triton(
    inputs: Tensor, weight: Tensor | None, epsilon: float, zero_centered: bool = False, notes_largest: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes `norm.rms_norm_with_residual`. The norm's backward adds the residual's gradient.

    `notes_largest`: notes the largest absolute values of the norm's output and of the input's gradient for fp8."""
    if not _takes(inputs, weight):
        return rms_norm_with_residual(inputs, weight, epsilon, zero_centered)
    return _Norm.apply(inputs, weight, None, epsilon, zero_centered, False, notes_largest)


def layer_norm_with_residual_triton(
    inputs: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    zero_centered: bool = False,
    notes_largest: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes `norm.layer_norm_with_residual`; see `rms_norm_with_residual_triton`."""
    if not _takes(inputs, weight):
        return layer_norm_with_residual(inputs, weight, bias, epsilon, zero_centered)
    return _Norm.apply(inputs, weight, bias, epsilon, zero_centered, True, notes_largest)


def _takes(inputs: Tensor, weight: Tensor | None) -> bool:
    types = {inputs.dtype} if weight is None else {inputs.dtype, weight.dtype}
    return torch.float64 not in types and inputs.shape[-1] <= _WIDEST


class _Norm(torch.autograd.Function):
    """Computes the formulas of `norm._RMSNorm`, and returns the input too. LayerNorm also subtracts dx's mean over the
    channels. Either result may be unused."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        zero_centered: bool,
        centered: bool,
        notes_largest: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        width = inputs.shape[-1]
        x = _as_rows(inputs, width)
        output = torch.empty(inputs.shape, dtype=inputs.dtype if weight is None else weight.dtype, device=x.device)
        inverses = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        means = torch.empty_like(inverses) if centered else None
        ctx.save_for_backward(inputs, means, inverses)
        # Keeps the parameter instead of a saved tensor; `ops.linear._Linear` says why.
        ctx.weight, ctx.zero_centered, ctx.centered = weight, zero_centered, centered
        ctx.notes_largest = notes_largest
        if output.numel():
            tile = _tile(width)
            largest = torch.zeros((), dtype=torch.int32, device=x.device) if notes_largest else None
            _norm_forward_kernel[(cdiv(x.shape[0], tile["ROWS"]),)](
                output, largest, means, inverses, x, weight, bias, x.shape[0], width, x.stride(0), epsilon,
                CENTERED=centered, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
                ZERO_CENTERED=zero_centered, NOTES=largest is not None, **tile,
            )  # fmt: skip
            if largest is not None:
                note_largest(output, largest.view(torch.float32))
        return output, inputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: AutogradContext, output_gradient: Tensor | None, residual_gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if output_gradient is None:
            return residual_gradient, None, None, None, None, None, None
        (inputs, means, inverses), weight = ctx.saved_tensors, ctx.weight
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        width = inputs.shape[-1]
        x, dy = _as_rows(inputs, width), _as_rows(output_gradient, width)
        residual = None if residual_gradient is None else _as_rows(residual_gradient, width)
        inputs_gradient = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        read = [tensor for tensor in (x, dy, residual) if tensor is not None]
        tile = _backward_tile(width, sum(tensor.element_size() for tensor in read))
        programs = max(1, min(cdiv(x.shape[0], tile["ROWS"]), _PROGRAMS * num_multiprocessors(x.device)))
        sums = [
            torch.empty(programs, width, dtype=torch.float32, device=x.device) if needed else None
            for needed in (needs_weight, needs_bias)
        ]
        largest = torch.zeros((), dtype=torch.int32, device=x.device) if ctx.notes_largest else None
        _norm_backward_kernel[(programs,)](
            inputs_gradient, largest, *sums, dy, residual, x, None if weight is None else weight.detach(), means,
            inverses, x.shape[0], width, dy.stride(0), 0 if residual is None else residual.stride(0), x.stride(0),
            CENTERED=ctx.centered, HAS_WEIGHT=weight is not None, SUMS_WEIGHT=needs_weight, SUMS_BIAS=needs_bias,
            ADDS_RESIDUAL=residual is not None, ZERO_CENTERED=ctx.zero_centered, NOTES=largest is not None, **tile,
        )  # fmt: skip
        if largest is not None:
            note_largest(inputs_gradient, largest.view(torch.float32))
        weight_gradient, bias_gradient = (None if s is None else sum_rows_triton(s, weight.dtype) for s in sums)
        return inputs_gradient, weight_gradient, bias_gradient, None, None, None, None


def _as_rows(tensor: Tensor, width: int) -> Tensor:
    """Returns [..., width] as [rows, width] with contiguous rows: a view if the rows are evenly spaced."""
    rows = tensor.reshape(-1, width)
    return rows if rows.stride(1) == 1 or width == 1 else rows.contiguous()


def _tile(width: int) -> dict[str, int]:
    """Returns the rows and channels of a program; the fastest of those tried on an H200."""
    channels = next_power_of_2(width)
    rows = 1 if channels >= 2048 else 4096 // channels
    return {"ROWS": rows, "WIDTH": channels, "num_warps": max(4, min(16, channels // 1024))}


def _backward_tile(width: int, element_bytes: int) -> dict[str, int]:
    """Returns the rows and channels of a program of the backward, and the number of stages of its pipelined loop.

    `element_bytes`: bytes of one element of each tensor that it reads, added up. Three stages, if they leave shared
    memory for several programs."""
    channels = next_power_of_2(width)
    if channels <= 256:
        return {"ROWS": 4096 // channels, "WIDTH": channels, "STAGES": 1, "num_warps": 8}
    rows = max(1, 2048 // channels)
    stages = 3 if rows * channels * element_bytes <= 32768 else 1
    return {"ROWS": rows, "WIDTH": channels, "STAGES": stages, "num_warps": max(4, min(16, channels // 256))}
