"""The gate of attention's output on a GPU: one kernel in each direction, which reads the gates inside the packed
projection and writes their gradient inside its packed gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.attention.output_gate import gate_output
from megatron.core.ops.split_columns import new_gradient_of
from megatron.core.ops.tiles import cdiv, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_ELEMENTS = 2048
"""Elements of a program."""


@triton.jit
def _output_gate_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    output, context, gate, rows, batch, groups, width, gate_s, gate_b, gate_g,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    valid = (row < rows) & (column < width)
    s, b, g = row // (batch * groups), row // groups % batch, row % groups
    factor = tl.sigmoid(tl.load(gate + s * gate_s + b * gate_b + g * gate_g + column, mask=valid).to(tl.float32))
    value = tl.load(context + row * width + column, mask=valid).to(tl.float32) * factor
    tl.store(output + row * width + column, value.to(output.dtype.element_ty), mask=valid)


@triton.jit
def _output_gate_backward_kernel(  # type: ignore[no-untyped-def]
    context_gradient, gate_gradient, gradient, context, gate, rows, batch, groups, width,
    gate_s, gate_b, gate_g, target_s, target_b, target_g, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    valid = (row < rows) & (column < width)
    s, b, g = row // (batch * groups), row // groups % batch, row % groups
    factor = tl.sigmoid(tl.load(gate + s * gate_s + b * gate_b + g * gate_g + column, mask=valid).to(tl.float32))
    dy = tl.load(gradient + row * width + column, mask=valid).to(tl.float32) * factor
    tl.store(context_gradient + row * width + column, dy.to(context_gradient.dtype.element_ty), mask=valid)
    of_gate = dy * (1.0 - factor) * tl.load(context + row * width + column, mask=valid).to(tl.float32)
    target = gate_gradient + s * target_s + b * target_b + g * target_g + column
    tl.store(target, of_gate.to(gate_gradient.dtype.element_ty), mask=valid)


def gate_output_triton(context: Tensor, gate: Tensor) -> Tensor:
    """Computes `output_gate.gate_output` with one rounding. Float64, and tensors of two types, use the reference."""
    if context.dtype is torch.float64 or context.dtype is not gate.dtype or not gate.numel():
        return gate_output(context, gate)
    return _GateOutput.apply(context, gate)


class _GateOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, context: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(context, gate)
        ctx.new_gradient = new_gradient_of(gate)
        gate = gate if gate.stride(-1) == 1 else gate.contiguous()
        output, (grid, tile) = torch.empty(context.shape, dtype=context.dtype, device=context.device), _tiles(gate)
        _output_gate_kernel[grid](output, context.contiguous(), gate, *_sizes(gate), *gate.stride()[:3], **tile)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
        context, gate = ctx.saved_tensors
        gate = gate if gate.stride(-1) == 1 else gate.contiguous()
        context_gradient = torch.empty(context.shape, dtype=context.dtype, device=context.device)
        gate_gradient, (grid, tile) = ctx.new_gradient(), _tiles(gate)
        _output_gate_backward_kernel[grid](
            context_gradient, gate_gradient, gradient.contiguous(), context.contiguous(), gate, *_sizes(gate),
            *gate.stride()[:3], *gate_gradient.stride()[:3], **tile,
        )  # fmt: skip
        return context_gradient, gate_gradient


def _sizes(gate: Tensor) -> tuple[int, int, int, int]:
    """Returns the rows of the kernels, the sizes b and g, and the width of a row."""
    length, batch, groups, width = gate.shape
    return length * batch * groups, batch, groups, width


def _tiles(gate: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    rows, *_, width = _sizes(gate)
    columns = min(_ELEMENTS, next_power_of_2(width))
    at_once = _ELEMENTS // columns
    return (cdiv(rows, at_once), cdiv(width, columns)), {"ROWS": at_once, "COLUMNS": columns}
