"""Grouped products of experts on a GPU. Outputs and input gradients: a kernel with specialised warps on Hopper, torch's
elsewhere. Weight gradients: kernels that accumulate into the float32 main gradient, on Hopper with specialised warps.

None of the kernels needs the groups' sizes on the host.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron.core.ops.gluon import gluon_kernel
from megatron.core.ops.moe.grouped_linear import (
    GroupedProducts,
    RowGroups,
    accumulate_grouped_product,
    grouped_bias,
    grouped_linear,
    grouped_product,
    is_one_product,
)
from megatron.core.ops.tiles import capability, cdiv, next_power_of_2
from megatron.core.utils.torch_private import grouped_mm

_BULK_MULTIPLE = 8
"""Elements of 16 bits in the 16 bytes that the rows of a bulk copy have to be multiples of."""


@dataclass(frozen=True)
class Accumulation:
    """How weight gradients are added to the total."""

    adds_in_bulk: bool
    """True: the copy engine adds a finished tile to the total, in the cache, and programs do not read the total. False:
    a program reads its tile of the total first and adds products to it. Each element is added to once, so both give the
    same bits at every run."""
    stages: int
    """Tiles of factors that are loaded ahead."""


ACCUMULATIONS = {"read 3": Accumulation(False, 3), "bulk 4": Accumulation(True, 4)}
ACCUMULATION_IN_USE = "bulk 4"
"""The faster one in training (docs/decisions/expert-dispatch.md)."""
ACCUMULATION_ON_SMALLER_GPUS = "read 3"
"""The one where programs have less shared memory than the 227 KB of capabilities 9 and 10. With 4 stages a program
needs 112 KB, with bulk copies 144 KB, and capabilities 8.6, 8.9 and 12 have 99 KB."""


def grouped_product_cuda(rows: Tensor, weight: Tensor, groups: RowGroups, transposed: bool) -> Tensor:
    """Computes `grouped_linear.grouped_product`. Types other than bfloat16 and odd widths use the reference. Outputs of
    rows behind the last group are not written."""
    if not is_one_product(rows.dtype, *weight.shape[1:]) or not rows.is_cuda:
        return grouped_product(rows, weight, groups, transposed)
    output = rows.new_empty(rows.shape[0], weight.shape[1 if transposed else 2])
    if not rows.shape[0]:
        return output
    rows = rows.contiguous()
    kernel = gluon_kernel("moe.grouped_product_specialized_triton")
    if kernel is not None and kernel.takes(rows, weight):
        kernel.grouped_product_specialized(output, rows, weight, groups.bounds, transposed)
        return output
    return grouped_mm(rows, weight.transpose(1, 2) if transposed else weight, offs=groups.bounds[1])


@triton.jit
def _masked(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    product, left, right, first, end, o, i, out_width, in_width, ROWS: tl.constexpr
):
    """Returns product + left^T right over the rows from `first` to before `end`, at most ROWS of them."""
    row = first + tl.arange(0, ROWS)
    valid = (row < end)[:, None]
    row = row.to(tl.int64)[:, None]
    dy = tl.load(left + row * out_width + o[None, :], mask=valid & (o < out_width)[None, :], other=0.0)
    x = tl.load(right + row * in_width + i[None, :], mask=valid & (i < in_width)[None, :], other=0.0)
    return tl.dot(tl.trans(dy), x, product)


@triton.jit
def _accumulate_kernel(  # type: ignore[no-untyped-def]
    total, left, right, total_tiles, left_tiles, right_tiles, ends, out_width, in_width,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, BAND: tl.constexpr, BULK: tl.constexpr,
    ADDS: tl.constexpr, FACTOR: tl.constexpr, REPLACES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    if start < end or REPLACES:  # an expert without rows has a gradient of zeros
        # Orders tiles in bands of BAND tile rows, so that neighbouring programs share inputs in the cache.
        tiles_out, tiles_in = tl.cdiv(out_width, OUT), tl.cdiv(in_width, IN)
        band = tl.program_id(0) // (BAND * tiles_in)
        height = tl.minimum(tiles_out - band * BAND, BAND)
        inside_band = tl.program_id(0) % (BAND * tiles_in)
        first_out, first_in = (band * BAND + inside_band % height) * OUT, (inside_band // height) * IN
        o, i = first_out + tl.arange(0, OUT), first_in + tl.arange(0, IN)
        at = total + group * out_width * in_width + o.to(tl.int64)[:, None] * in_width + i[None, :]
        inside = (o < out_width)[:, None] & (i < in_width)[None, :]
        if ADDS or REPLACES or FACTOR != 1.0:
            product = tl.zeros((OUT, IN), tl.float32)
        else:  # read before the products and not after them: the load is hidden behind those of their factors
            product = tl.load(at, mask=inside, other=0.0)
        if BULK:  # the copy engine does not know where a group ends, so it moves whole tiles only
            whole = (end - start) // ROWS * ROWS
            for first in range(start, start + whole, ROWS):
                dy, x = left_tiles.load([first, first_out]), right_tiles.load([first, first_in])
                product = tl.dot(tl.trans(dy), x, product)
            if start + whole < end:
                product = _masked(product, left, right, start + whole, end, o, i, out_width, in_width, ROWS)
        else:
            for first in range(start, end, ROWS):
                product = _masked(product, left, right, first, end, o, i, out_width, in_width, ROWS)
        if FACTOR != 1.0:
            product *= FACTOR
            if not ADDS and not REPLACES:
                product += tl.load(at, mask=inside, other=0.0)
        if ADDS and REPLACES:
            total_tiles.store([group.to(tl.int32), first_out, first_in], product.reshape((1, OUT, IN)))
        elif ADDS:
            total_tiles.atomic_add([group.to(tl.int32), first_out, first_in], product.reshape((1, OUT, IN)))
        else:
            tl.store(at, product, mask=inside)


def accumulate_grouped_product_triton(
    total: Tensor,
    left: Tensor,
    right: Tensor,
    groups: RowGroups,
    factor: float = 1.0,
    replaces: bool = False,
    way: Accumulation | None = None,
) -> None:
    """Computes `grouped_linear.accumulate_grouped_product`. Types other than bfloat16 and float16 use the reference.
    `way` chooses a way of the kernel without specialised warps."""
    if left.dtype not in (torch.bfloat16, torch.float16) or total.dtype is not torch.float32:
        accumulate_grouped_product(total, left, right, groups, factor, replaces)
        return
    assert total.is_contiguous() and left.dtype is right.dtype
    left, right = left.contiguous(), right.contiguous()
    kernel = gluon_kernel("moe.grouped_accumulate_specialized_triton") if way is None and left.is_cuda else None
    if kernel is not None and kernel.takes(total, left, right):
        kernel.accumulate_specialized(total, left, right, groups.bounds, factor, replaces)
        return
    in_bulk = all(_copies_in_bulk(factor) for factor in (left, right))
    way = way or ACCUMULATIONS[ACCUMULATION_IN_USE if _capability(left)[0] in (9, 10) else ACCUMULATION_ON_SMALLER_GPUS]
    number, out_width, in_width = total.shape
    out_tile, in_tile, rows = _tile(out_width, in_width)
    grid = (cdiv(out_width, out_tile) * cdiv(in_width, in_tile), number)
    tiles = [
        TensorDescriptor.from_tensor(factor, [rows, width]) if in_bulk else None
        for factor, width in ((left, out_tile), (right, in_tile))
    ]
    adds = way.adds_in_bulk and in_bulk and not (in_width % 4 or total.data_ptr() % 16)
    total_tiles = TensorDescriptor.from_tensor(total, [1, out_tile, in_tile]) if adds else None
    _accumulate_kernel[grid](
        total, left, right, total_tiles, *tiles, groups.bounds[1], out_width, in_width,
        OUT=out_tile, IN=in_tile, ROWS=rows, BAND=8, BULK=in_bulk, ADDS=adds, FACTOR=factor,
        REPLACES=replaces, num_warps=8, num_stages=way.stages,
    )  # fmt: skip


def _copies_in_bulk(rows: Tensor) -> bool:
    """Returns whether the copy engine (bulk tensor copies, capability 9.0 and up) can move tiles of these rows."""
    if not rows.shape[0] or rows.shape[1] % _BULK_MULTIPLE or rows.data_ptr() % 16:
        return False
    return _capability(rows) >= (9, 0)


def _capability(tensor: Tensor) -> tuple[int, int]:
    """Returns the capability of a tensor's GPU; Hopper's on a CPU, where Triton's interpreter runs the kernels."""
    return capability(tensor.device) if tensor.is_cuda else (9, 0)


def _tile(out_width: int, in_width: int) -> tuple[int, int, int]:
    """Returns the outputs, inputs and rows of a program's tile."""
    return (
        min(128, max(16, next_power_of_2(out_width))),
        min(256, max(16, next_power_of_2(in_width))),
        64,
    )


CUDA_PRODUCTS = GroupedProducts(grouped_product_cuda, accumulate_grouped_product_triton)


def grouped_linear_cuda(inputs: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """Computes `grouped_linear.grouped_linear`."""
    return grouped_linear(inputs, weight, groups, CUDA_PRODUCTS)


def grouped_bias_cuda(bias: Tensor, groups: RowGroups, rows: int) -> Tensor:
    """Computes `grouped_linear.grouped_bias`."""
    return grouped_bias(bias, groups, rows, CUDA_PRODUCTS)
