"""Grouped products of fp8 matrices on a GPU (Hopper and later). No kernel needs the groups' sizes on the host.

The fp8 units of Hopper keep about 14 bits of a sum. With `precise` each 128 terms are added in float32: gradients are
computed so, outputs are not, as in dense linear layers.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron.core.ops.fp8 import grouped
from megatron.core.ops.fp8.formats import BLOCK
from megatron.core.ops.fp8.grouped import QuantizedGroups, Segments
from megatron.core.ops.fp8.grouped_quantize_triton import place_of_block
from megatron.core.ops.gluon import gluon_kernel
from megatron.core.ops.sum_rows_triton import num_multiprocessors
from megatron.core.ops.tiles import cdiv

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tile:
    """What a program computes, and how."""

    height: int
    """Outputs of a tile of a weight gradient. Products of rows have blocks of 128 rows."""
    width: int
    stages: int
    warps: int
    persistent: bool = False
    """Each multiprocessor has one program, which loads for a tile while it stores the one before."""


@dataclass(frozen=True)
class Tiles:
    """The tile of each kind of product."""

    fast: Tile
    """Sums of few bits, results of 16 bits."""
    fast_float32: Tile
    """Sums of few bits, results of 32 bits: 256 of them do not fit into shared memory beside what the next tile
    loads."""
    precise: Tile
    """Precise sums."""
    blocks: Tile
    """A scale for each block, which needs a second accumulator."""
    weight: Tile
    """Weight gradients."""
    weight_parts: Tile
    """Weight gradients whose blocks, or segments of one group, have scales of their own: a second accumulator."""


_SQUARE, _SMALL = Tile(128, 128, 4, 8), Tile(128, 128, 3, 4)
TILES = Tiles(
    fast=Tile(128, 256, 4, 8, persistent=True),
    fast_float32=Tile(128, 256, 3, 8),
    precise=_SMALL,
    blocks=_SQUARE,
    weight=_SMALL,
    weight_parts=_SQUARE,
)
"""The fastest of those that were measured on an H200 (docs/benchmarks.md)."""


@triton.jit
def _dot(left, right, total, PRECISE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """Returns total + left right^T."""
    if PRECISE:
        total = tl.dot(left, right.T, total, max_num_imprecise_acc=BLOCK)
    else:
        total = tl.dot(left, right.T, total)
    return total


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    output, rows, weight, row_factors, weight_factors, of_blocks, ends, block_ends, number, per_group, width, k, step,
    row_stride, row_step, group_step, line_step, block_step,
    TRANSPOSED: tl.constexpr, ROW_SCALE: tl.constexpr, WEIGHT_SCALE: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """ROW_SCALE and WEIGHT_SCALE: 0 one for all, 1 one for a segment or group, 3 one for a block."""
    tiles = tl.cdiv(width, WIDTH)
    last = tl.load(block_ends + number - 1) * tiles
    # Neighbouring tiles share a block of rows; an expert's weight stays in the cache for all its blocks.
    for tile in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=FLATTEN):
        segment, first, end = place_of_block(tile // tiles, of_blocks, ends, block_ends, number, BLOCK)
        group = segment // per_group
        first_out = tile % tiles * WIDTH
        row, out = first + tl.arange(0, BLOCK), first_out + tl.arange(0, WIDTH)
        total = tl.zeros((BLOCK, WIDTH), tl.float32)
        if ROW_SCALE == 3:
            of_rows = row_factors + (tile // tiles * BLOCK + tl.arange(0, BLOCK)) * row_stride
            of_line = weight_factors + group * group_step + tl.minimum(out, width - 1) // BLOCK * line_step
            for start in range(0, k, BLOCK):
                left = rows.load([first, start])
                right = weight.load(
                    [first_out, group * step + start] if TRANSPOSED else [group * step + first_out, start]
                )
                row_factor = tl.load(of_rows + start // BLOCK * row_step, mask=row < end, other=0.0)
                weight_factor = tl.load(of_line + start // BLOCK * block_step)
                total += tl.dot(left, right.T) * (row_factor[:, None] * weight_factor[None, :])
        else:
            for start in range(0, k, BLOCK):
                left = rows.load([first, start])
                right = weight.load(
                    [first_out, group * step + start] if TRANSPOSED else [group * step + first_out, start]
                )
                total = _dot(left, right, total, PRECISE, BLOCK)
            total *= tl.load(row_factors + (segment if ROW_SCALE == 1 else 0))
            total *= tl.load(weight_factors + (group if WEIGHT_SCALE == 1 else 0))
        at = output + row.to(tl.int64)[:, None] * width + out[None, :]
        tl.store(at, total.to(output.dtype.element_ty), mask=(row < end)[:, None] & (out < width)[None, :])


@triton.jit
def _weight_kernel(  # type: ignore[no-untyped-def]
    total, left, right, left_factors, right_factors, of_blocks, block_ends, groups, per_group, out_width, in_width,
    left_step, left_stride, right_step, right_stride,
    SCALE: tl.constexpr, PARTS: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr,
    OUT: tl.constexpr, IN: tl.constexpr, BAND: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """SCALE as in the kernel of products; PARTS: the segments of a group have factors of their own, and
    the product of each block is scaled."""
    tiles_out, tiles_in = tl.cdiv(out_width, OUT), tl.cdiv(in_width, IN)
    of_group = tiles_out * tiles_in
    for tile in tl.range(tl.program_id(0), groups * of_group, tl.num_programs(0), flatten=FLATTEN):
        group, inside_group = tile // of_group, tile % of_group
        # Orders tiles in bands of BAND tile rows, so that neighbouring programs share inputs in the cache.
        band = inside_group // (BAND * tiles_in)
        height = tl.minimum(tiles_out - band * BAND, BAND)
        inside_band = inside_group % (BAND * tiles_in)
        first_out, first_in = (band * BAND + inside_band % height) * OUT, (inside_band // height) * IN
        o, i = first_out + tl.arange(0, OUT), first_in + tl.arange(0, IN)
        segment = group * per_group
        block = tl.load(block_ends + segment - 1, mask=segment > 0, other=0)
        last = tl.load(block_ends + segment + per_group - 1)
        end_out = tl.where(block < last, out_width, 0)  # a group without rows is left as it is
        found = tl.zeros((OUT, IN), tl.float32)
        if SCALE == 3:
            of_left = left_factors + tl.minimum(o, out_width - 1) * left_stride
            of_right = right_factors + tl.minimum(i, in_width - 1) * right_stride
            for number in range(block, last):
                dy, x = left.load([first_out, number * BLOCK]), right.load([first_in, number * BLOCK])
                left_factor = tl.load(of_left + number * left_step)
                right_factor = tl.load(of_right + number * right_step)
                found += tl.dot(dy, x.T) * (left_factor[:, None] * right_factor[None, :])
        elif PARTS:
            # Not a loop over segments: on an H200, Triton 3.6 did not zero the inner loop's sum for each of them.
            for number in range(block, last):
                dy, x = left.load([first_out, number * BLOCK]), right.load([first_in, number * BLOCK])
                part = tl.load(of_blocks + number)
                product = tl.dot(dy, x.T)
                found += _scaled(product, left_factors, right_factors, part, SCALE)
        else:
            for number in range(block, last):
                dy, x = left.load([first_out, number * BLOCK]), right.load([first_in, number * BLOCK])
                found = _dot(dy, x, found, PRECISE, BLOCK)
            found = _scaled(found, left_factors, right_factors, segment, SCALE)
        at = total + group.to(tl.int64) * out_width * in_width + o.to(tl.int64)[:, None] * in_width + i[None, :]
        inside = (o < end_out)[:, None] & (i < in_width)[None, :]
        tl.store(at, tl.load(at, mask=inside, other=0.0) + found, mask=inside)


@triton.jit
def _scaled(product, left_factors, right_factors, segment, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a product of a segment times its factors."""
    at = segment if SCALE == 1 else 0
    return product * (tl.load(left_factors + at) * tl.load(right_factors + at))


_SCALES = {"all": 0, "segments": 1, "blocks": 3, "squares": 3}


def product_of_groups_triton(
    rows: QuantizedGroups,
    weight: QuantizedGroups,
    segments: Segments,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    precise: bool = True,
    tile: Tile | None = None,
) -> Tensor:
    """Does `grouped.product_of_groups` in one kernel; without `precise`, sums have about 14 bits. Leaves float64, and
    GPUs without fp8 units, to the definition."""
    if dtype not in _KERNEL_TYPES or not _has_units(rows.values):
        return grouped.product_of_groups(rows, weight, segments, dtype, transposed=transposed, precise=precise)
    (n, k), height = rows.values.shape, weight.values.shape[0]
    width = height if transposed else height // segments.groups
    output = torch.empty(n, width, dtype=dtype, device=rows.values.device)
    if not n:
        return output
    kernels = specialized_kernels(rows, weight) if tile is None and dtype is not torch.float32 else None
    if kernels is not None:
        product: Tensor = kernels.product_of_blocks(rows, weight, segments, dtype, transposed=transposed)
        return product
    scales = _SCALES[rows.scope], _SCALES[weight.scope]
    tile = tile or _tile_of_rows(3 in scales, precise, dtype)
    weight_factors = weight.factors
    steps: tuple[int, ...] = (0, 0, 0, 0, 0)
    if rows.scope == "blocks":
        in_out, in_k = cdiv(width, BLOCK), cdiv(k, BLOCK)
        row_steps, (line, block) = rows.factors.stride(), weight_factors.stride()
        steps = (*row_steps, in_k * block, line, block) if transposed else (*row_steps, in_out * line, line, block)
    tiles = segments.blocks * cdiv(width, tile.width)
    _product_kernel[(_programs(tiles, tile, output),)](
        output, TensorDescriptor.from_tensor(rows.values, [BLOCK, BLOCK]),
        TensorDescriptor.from_tensor(weight.values, [tile.width, BLOCK]), rows.factors, weight_factors,
        segments.of_blocks, segments.ends, segments.block_ends, segments.number, segments.per_group, width, k,
        weight.values.shape[1] // segments.groups if transposed else width, *steps,
        TRANSPOSED=transposed, ROW_SCALE=scales[0], WEIGHT_SCALE=scales[1], PRECISE=precise, BLOCK=BLOCK,
        WIDTH=tile.width, FLATTEN=tile.persistent, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return output


def accumulate_product_of_groups_triton(
    total: Tensor,
    left: QuantizedGroups,
    right: QuantizedGroups,
    segments: Segments,
    *,
    precise: bool = True,
    tile: Tile | None = None,
) -> None:
    """Does `grouped.accumulate_product_of_groups` in one kernel, without atomic additions. Leaves float64, and GPUs
    without fp8 units, to the definition."""
    if total.dtype is not torch.float32 or not _has_units(left.values):
        grouped.accumulate_product_of_groups(total, left, right, segments)
        return
    assert total.is_contiguous()
    if not segments.rows:
        return
    kernels = specialized_kernels(left, right) if tile is None else None
    if kernels is not None:
        kernels.accumulate_product_of_blocks(total, left, right, segments)
        return
    number, out_width, in_width = total.shape
    if left.scope != right.scope:  # one of them has one factor for all
        left, right = _for_segments(left, segments), _for_segments(right, segments)
    steps = (*left.factors.t().stride(), *right.factors.t().stride()) if left.scope == "blocks" else (0, 0, 0, 0)
    in_parts = left.scope == "segments" and segments.per_group > 1
    tile = tile or (TILES.weight_parts if in_parts or left.scope == "blocks" else TILES.weight)
    tiles = number * cdiv(out_width, tile.height) * cdiv(in_width, tile.width)
    _weight_kernel[(_programs(tiles, tile, total),)](
        total, TensorDescriptor.from_tensor(left.values, [tile.height, BLOCK]),
        TensorDescriptor.from_tensor(right.values, [tile.width, BLOCK]), left.factors, right.factors,
        segments.of_blocks, segments.block_ends, number, segments.per_group, out_width, in_width, *steps,
        SCALE=_SCALES[left.scope], PARTS=in_parts, PRECISE=precise, BLOCK=BLOCK, OUT=tile.height, IN=tile.width,
        BAND=8, FLATTEN=tile.persistent, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _tile_of_rows(in_blocks: bool, precise: bool, dtype: torch.dtype) -> Tile:
    """Returns the tile of products of rows; `in_blocks`: each block has a scale."""
    if in_blocks:
        return TILES.blocks
    if precise:
        return TILES.precise
    return TILES.fast_float32 if dtype is torch.float32 else TILES.fast


def _programs(tiles: int, tile: Tile, result: Tensor) -> int:
    return min(tiles, num_multiprocessors(result.device)) if tile.persistent else tiles


def _for_segments(matrix: QuantizedGroups, segments: Segments) -> QuantizedGroups:
    return QuantizedGroups(matrix.values, matrix.factors.expand(segments.number).contiguous(), "segments")


def specialized_kernels(left: QuantizedGroups, right: QuantizedGroups) -> ModuleType | None:
    """Returns the kernels with specialised warps if they can compute a product: of blocks, on a Hopper GPU."""
    if left.scope != "blocks" or not left.values.is_cuda:
        return None
    if torch.cuda.get_device_capability(left.values.device) != (9, 0):
        return None
    if max(left.factors.numel(), right.factors.numel()) >= 2**31:
        return None
    return gluon_kernel("fp8.block_product_specialized_triton")


def _has_units(values: Tensor) -> bool:
    """Whether the device multiplies tiles of fp8 that its copy engine moves (capability 9.0 and up)."""
    return not values.is_cuda or torch.cuda.get_device_capability(values.device) >= (9, 0)
