"""Bias and residual added in one pass on a GPU; backward only sums the bias's gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.sum_rows_triton import sum_rows_triton
from megatron.core.ops.tiles import cdiv, next_power_of_2

_TILE = 2048
"""Elements that a program adds."""


@triton.jit
def _add_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    output, inputs, bias, residual, rows, width,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    value = tl.load(inputs + at, mask=valid).to(tl.float32)
    value += tl.load(bias + column, mask=column < width).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=valid).to(tl.float32)
    tl.store(output + at, value.to(output.dtype.element_ty), mask=valid)


def bias_add_triton(inputs: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """Returns residual + inputs + bias ([t, h], [h]), summed in float32 and rounded once; not for float64."""
    return _BiasAdd.apply(inputs, bias, residual)


class _BiasAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
        rows, width = inputs.shape
        ctx.types = inputs.dtype, bias.dtype, None if residual is None else residual.dtype
        dtype = inputs.dtype if residual is None else torch.promote_types(inputs.dtype, residual.dtype)
        output = torch.empty(rows, width, dtype=dtype, device=inputs.device)
        if output.numel():
            columns = min(_TILE, next_power_of_2(width))
            at_once = max(1, _TILE // columns)
            _add_kernel[(cdiv(rows, at_once), cdiv(width, columns))](
                output, inputs.contiguous(), bias, None if residual is None else residual.contiguous(), rows, width,
                HAS_RESIDUAL=residual is not None, ROWS=at_once, COLUMNS=columns,
            )  # fmt: skip
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        inputs_type, bias_type, residual_type = ctx.types
        bias_gradient = sum_rows_triton(output_gradient, bias_type) if ctx.needs_input_grad[1] else None
        residual_gradient = None if residual_type is None else output_gradient.to(residual_type)
        return output_gradient.to(inputs_type), bias_gradient, residual_gradient
