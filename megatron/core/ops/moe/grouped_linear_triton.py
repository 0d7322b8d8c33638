"""Grouped products of experts on a GPU: torch's kernel for outputs and input gradients, our own for weight gradients.

Our kernel accumulates into the float32 main gradient. None of the kernels needs the groups' sizes on the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.moe.grouped_linear import (
    GroupedProducts,
    RowGroups,
    accumulate_grouped_product,
    grouped_bias,
    grouped_linear,
    grouped_product,
    is_one_product,
)
from megatron.core.utils.torch_private import grouped_mm


def grouped_product_cuda(rows: Tensor, weight: Tensor, groups: RowGroups, transposed: bool) -> Tensor:
    """Computes `grouped_linear.grouped_product`. Types other than bfloat16 and odd widths use the reference."""
    if not is_one_product(rows.dtype, *weight.shape[1:]) or not rows.is_cuda:
        return grouped_product(rows, weight, groups, transposed)
    if not rows.shape[0]:
        return rows.new_empty(0, weight.shape[1 if transposed else 2])
    return grouped_mm(rows.contiguous(), weight.transpose(1, 2) if transposed else weight, offs=groups.ends)


@triton.jit
def _accumulate_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    total, left, right, ends, out_width, in_width,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    if start < end:
        # Orders tiles in bands of BAND tile rows, so that neighbouring programs share inputs in the cache.
        tiles_out, tiles_in = tl.cdiv(out_width, OUT), tl.cdiv(in_width, IN)
        band = tl.program_id(0) // (BAND * tiles_in)
        height = tl.minimum(tiles_out - band * BAND, BAND)
        inside_band = tl.program_id(0) % (BAND * tiles_in)
        o = (band * BAND + inside_band % height) * OUT + tl.arange(0, OUT)
        i = (inside_band // height) * IN + tl.arange(0, IN)
        product = tl.zeros((OUT, IN), tl.float32)
        for first in range(start, end, ROWS):
            row = first + tl.arange(0, ROWS)
            there = (row < end)[:, None]
            row = row.to(tl.int64)[:, None]
            dy = tl.load(left + row * out_width + o[None, :], mask=there & (o < out_width)[None, :], other=0.0)
            x = tl.load(right + row * in_width + i[None, :], mask=there & (i < in_width)[None, :], other=0.0)
            product = tl.dot(tl.trans(dy), x, product)
        at = total + group * out_width * in_width + o.to(tl.int64)[:, None] * in_width + i[None, :]
        inside = (o < out_width)[:, None] & (i < in_width)[None, :]
        tl.store(at, tl.load(at, mask=inside, other=0.0) + product, mask=inside)


def accumulate_grouped_product_triton(total: Tensor, left: Tensor, right: Tensor, groups: RowGroups) -> None:
    """Computes `grouped_linear.accumulate_grouped_product`. Types other than bfloat16 and float16 use the reference."""
    if left.dtype not in (torch.bfloat16, torch.float16) or total.dtype is not torch.float32:
        accumulate_grouped_product(total, left, right, groups)
        return
    assert total.is_contiguous() and left.dtype is right.dtype
    number, out_width, in_width = total.shape
    out_tile, in_tile, rows = _tile(out_width, in_width)
    grid = (triton.cdiv(out_width, out_tile) * triton.cdiv(in_width, in_tile), number)
    _accumulate_kernel[grid](
        total, left.contiguous(), right.contiguous(), groups.ends, out_width, in_width,
        OUT=out_tile, IN=in_tile, ROWS=rows, BAND=8, num_warps=8, num_stages=3,
    )  # fmt: skip


def _tile(out_width: int, in_width: int) -> tuple[int, int, int]:
    """Returns the outputs, inputs and rows of a program's tile."""
    return (
        min(128, max(16, triton.next_power_of_2(out_width))),
        min(256, max(16, triton.next_power_of_2(in_width))),
        64,
    )


CUDA_PRODUCTS = GroupedProducts(grouped_product_cuda, accumulate_grouped_product_triton)


def grouped_linear_cuda(inputs: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """Computes `grouped_linear.grouped_linear`."""
    return grouped_linear(inputs, weight, groups, CUDA_PRODUCTS)


def grouped_bias_cuda(bias: Tensor, groups: RowGroups, rows: int) -> Tensor:
    """Computes `grouped_linear.grouped_bias`."""
    return grouped_bias(bias, groups, rows, CUDA_PRODUCTS)
