"""Backward of `split_columns` on a GPU: one kernel copies the gradients of up to four parts, which may have any
strides, into the gradient of the packed columns."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.split_columns import split_columns
from megatron.core.ops.tiles import cdiv, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_PARTS = 4
_ELEMENTS = 4096
"""Elements of a program."""


@triton.jit
def _join_columns_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    packed, part0, part1, part2, part3, s0, b0, g0, s1, b1, g1, s2, b2, g2, s3, b3, g3,
    rows, batch, groups, end0, end1, end2, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s, b, g = row // (batch * groups), row // groups % batch, row % groups
    column = tl.arange(0, COLUMNS)[None, :]
    there = (row < rows)[:, None]
    first, second, third = column < end0, column < end1, column < end2
    at = (s * s0 + b * b0 + g * g0)[:, None] + column
    value = tl.load(part0 + at, mask=there & first, other=0.0)
    at = (s * s1 + b * b1 + g * g1)[:, None] + column - end0
    value = tl.where(first, value, tl.load(part1 + at, mask=there & (column >= end0) & second, other=0.0))
    at = (s * s2 + b * b2 + g * g2)[:, None] + column - end1
    value = tl.where(second, value, tl.load(part2 + at, mask=there & (column >= end1) & third, other=0.0))
    at = (s * s3 + b * b3 + g * g3)[:, None] + column - end2
    there &= column < WIDTH
    value = tl.where(third, value, tl.load(part3 + at, mask=there & (column >= end2), other=0.0))
    tl.store(packed + row[:, None] * WIDTH + column, value, mask=there)


def split_columns_triton(packed: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Computes `split_columns.split_columns`. Only up to four parts of at most 4,096 columns together have the
    kernel."""
    if len(widths) > _PARTS or packed.shape[-1] > _ELEMENTS or not packed.numel():
        return split_columns(packed, widths)
    return _SplitColumns.apply(packed, tuple(widths))


class _SplitColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, packed: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.widths = widths
        return packed.split(list(widths), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = [g if g.stride(-1) == 1 else g.contiguous() for g in gradients]
        s, b, groups, _ = parts[0].shape
        parts += parts[-1:] * (_PARTS - len(parts))  # of width 0: never read
        width, ends = sum(ctx.widths), [sum(ctx.widths[:number]) for number in range(1, _PARTS)]
        packed = parts[0].new_empty(s, b, groups, width)
        columns = next_power_of_2(width)
        rows = max(1, _ELEMENTS // columns)
        strides = [stride for part in parts for stride in part.stride()[:3]]
        _join_columns_kernel[(cdiv(s * b * groups, rows),)](
            packed, *parts, *strides, s * b * groups, b, groups, *ends, WIDTH=width, ROWS=rows, COLUMNS=columns
        )
        return packed, None
