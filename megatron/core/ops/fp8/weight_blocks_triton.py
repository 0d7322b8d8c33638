"""Quantisation of flat parts of weights on a GPU; every rounding is that of the definitions in `weight_blocks`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.fp8 import weight_blocks
from megatron.core.ops.fp8.formats import largest_finite
from megatron.core.ops.fp8.quantize_triton import as_fp8, bits_of_size, has_kernel
from megatron.core.ops.fp8.weight_blocks import WeightBlocks
from megatron.core.ops.sum_rows_triton import num_multiprocessors
from megatron.core.ops.tiles import cdiv

_AT_ONCE = 4096
"""Elements that a program reads at once, if a block is a whole matrix."""
_PROGRAMS = 8
"""Programs of the largest value for each multiprocessor."""
_TILE = 128
"""Rows and columns of a program's tile otherwise. A block is a whole number of tiles."""
_GROUPS = 32
_GROUP_COLUMNS = 64
"""Groups of four rows, and columns, of a program that transposes."""
_MODEL = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit
def _rounded(x, MODEL: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """Returns x rounded to the model's type, in float32."""
    x = x.to(tl.float32)
    if MODEL == 1:  # bfloat16, to nearest even on the bits, because Triton's interpreter cuts them off
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    if MODEL == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _largest_of_groups_kernel(  # type: ignore[no-untyped-def]
    largest, values, start, count, size, first_group, steps, MODEL: tl.constexpr, AT_ONCE: tl.constexpr
):
    group = first_group + tl.program_id(1).to(tl.int64)
    begin = tl.maximum(group * size - start, 0)
    end = tl.minimum((group + 1) * size - start, count)
    found = tl.zeros((AT_ONCE,), tl.int32)
    begin += tl.program_id(0).to(tl.int64) * steps * AT_ONCE
    for step in range(steps):
        at = begin + step * AT_ONCE + tl.arange(0, AT_ONCE)
        x = tl.load(values + at, mask=at < end, other=0.0)
        found = tl.maximum(found, bits_of_size(_rounded(x, MODEL)))
    tl.atomic_max(largest + group, tl.max(found, 0))


@triton.jit
def _cast_groups_kernel(  # type: ignore[no-untyped-def]
    out, values, scales, start, count, size, first_group, limit,
    ONE_SCALE: tl.constexpr, E5M2: tl.constexpr, MODEL: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    group = first_group + tl.program_id(1).to(tl.int64)
    begin = tl.maximum(group * size - start, 0)
    end = tl.minimum((group + 1) * size - start, count)
    at = begin + tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    scale = tl.load(scales + (0 if ONE_SCALE else group))
    x = _rounded(tl.load(values + at, mask=at < end, other=0.0), MODEL)
    tl.store(out + at, as_fp8(x * scale, limit, E5M2), mask=at < end)


@triton.jit
def _tile(start, count, height, width, first_group, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the positions of a program's tile among the given values, and which of them are given."""
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    group = first_group + tl.program_id(2).to(tl.int64)
    at = (group * height + row)[:, None] * width + column[None, :] - start
    return at, (row < height)[:, None] & (column < width)[None, :] & (at >= 0) & (at < count)


@triton.jit
def _block(down, across, first_group, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the block of a program's tile."""
    group = first_group + tl.program_id(2).to(tl.int64)
    return (group * down + tl.program_id(1) // (BLOCK_H // TILE)) * across + tl.program_id(0) // (BLOCK_W // TILE)


@triton.jit
def _largest_of_tiles_kernel(  # type: ignore[no-untyped-def]
    largest, values, start, count, height, width, down, across, first_group,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, MODEL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, valid = _tile(start, count, height, width, first_group, TILE)
    size = bits_of_size(_rounded(tl.load(values + at, mask=valid, other=0.0), MODEL))
    tl.atomic_max(largest + _block(down, across, first_group, BLOCK_H, BLOCK_W, TILE), tl.max(tl.max(size, 1), 0))


@triton.jit
def _cast_tiles_kernel(  # type: ignore[no-untyped-def]
    out, values, scales, start, count, height, width, down, across, first_group, limit,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, E5M2: tl.constexpr, MODEL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, valid = _tile(start, count, height, width, first_group, TILE)
    x = _rounded(tl.load(values + at, mask=valid, other=0.0), MODEL)
    scale = tl.load(scales + _block(down, across, first_group, BLOCK_H, BLOCK_W, TILE))
    tl.store(out + at, as_fp8(x * scale, limit, E5M2), mask=valid)


@triton.jit
def _transpose_kernel(  # type: ignore[no-untyped-def]
    words, codes, height, width, padded_words, GROUPS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Joins the bytes of four rows to the 32-bit words of the transposed matrix, which move through shared memory
    several times faster than bytes."""
    word_row = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(2).to(tl.int64)
    word = tl.zeros((GROUPS, COLUMNS), tl.uint32)
    for number in tl.static_range(4):
        row = word_row * 4 + number
        valid = (row < height)[:, None] & (column < width)[None, :]
        code = tl.load(codes + (group * height + row)[:, None] * width + column[None, :], mask=valid, other=0)
        word |= code.to(tl.uint32) << (8 * number)
    to = words + (column.to(tl.int64) * tl.num_programs(2) + group)[:, None] * padded_words + word_row[None, :]
    valid = (column < width)[:, None] & (word_row < padded_words)[None, :]
    tl.store(to, tl.trans(word.to(tl.int32, bitcast=True)), mask=valid)


def largest_of_blocks_triton(
    values: Tensor, start: int, blocks: WeightBlocks, dtype: torch.dtype, largest: Tensor
) -> None:
    """Does `weight_blocks.largest_of_blocks` in one kernel; leaves float64 to the definition."""
    if not _has_kernel(values, blocks, dtype):
        weight_blocks.largest_of_blocks(values, start, blocks, dtype, largest)
        return
    first, number = _groups(values, start, blocks)
    bits = largest.view(torch.int32)
    if blocks.has_one_for_each_group:
        size, count = blocks.height * blocks.width, values.numel()
        longest = min(size, count)
        programs = max(1, _PROGRAMS * num_multiprocessors(values.device) // number)
        steps = cdiv(longest, _AT_ONCE * programs)
        _largest_of_groups_kernel[cdiv(longest, _AT_ONCE * steps), number](
            bits, values, start, count, size, first, steps, MODEL=_MODEL[dtype], AT_ONCE=_AT_ONCE, num_warps=8
        )
        return
    _, down, across = blocks.shape
    _largest_of_tiles_kernel[cdiv(blocks.width, _TILE), cdiv(blocks.height, _TILE), number](
        bits, values, start, values.numel(), blocks.height, blocks.width, down, across, first,
        BLOCK_H=blocks.block_height, BLOCK_W=blocks.block_width, MODEL=_MODEL[dtype], TILE=_TILE, num_warps=8,
    )  # fmt: skip


def cast_blocks_triton(
    values: Tensor, start: int, blocks: WeightBlocks, dtype: torch.dtype, scales: Tensor, out: Tensor
) -> None:
    """Does `weight_blocks.cast_blocks` in one kernel; leaves float64 to the definition."""
    if not _has_kernel(values, blocks, dtype):
        weight_blocks.cast_blocks(values, start, blocks, dtype, scales, out)
        return
    first, number = _groups(values, start, blocks)
    limit, is_e5m2 = largest_finite(out.dtype), out.dtype is torch.float8_e5m2
    if blocks.has_one_for_each_group or not scales.dim():
        size, count = blocks.height * blocks.width, values.numel()
        _cast_groups_kernel[cdiv(min(size, count), _AT_ONCE), number](
            out.view(torch.uint8), values, scales, start, count, size, first, limit,
            ONE_SCALE=not scales.dim(), E5M2=is_e5m2, MODEL=_MODEL[dtype], AT_ONCE=_AT_ONCE, num_warps=8,
        )  # fmt: skip
        return
    _, down, across = blocks.shape
    _cast_tiles_kernel[cdiv(blocks.width, _TILE), cdiv(blocks.height, _TILE), number](
        out.view(torch.uint8), values, scales, start, values.numel(), blocks.height, blocks.width, down, across, first,
        limit,
        BLOCK_H=blocks.block_height, BLOCK_W=blocks.block_width, E5M2=is_e5m2, MODEL=_MODEL[dtype], TILE=_TILE,
        num_warps=8,
    )  # fmt: skip


def transposed_codes_triton(codes: Tensor, multiple: int) -> Tensor:
    """Does `weight_blocks.transposed_codes` in one kernel."""
    groups, height, width = codes.shape
    padded = cdiv(height, multiple) * multiple
    if padded % 4 or codes.numel() == 0:
        return weight_blocks.transposed_codes(codes, multiple)
    out = torch.empty(width, groups * padded, dtype=codes.dtype, device=codes.device)
    grid = cdiv(padded, 4 * _GROUPS), cdiv(width, _GROUP_COLUMNS), groups
    _transpose_kernel[grid](
        out.view(torch.int32), codes.view(torch.uint8), height, width, padded // 4,
        GROUPS=_GROUPS, COLUMNS=_GROUP_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def _has_kernel(values: Tensor, blocks: WeightBlocks, dtype: torch.dtype) -> bool:
    whole_tiles = blocks.block_height % _TILE == 0 and blocks.block_width % _TILE == 0
    return has_kernel(values) and dtype in _MODEL and (blocks.has_one_for_each_group or whole_tiles)


def _groups(values: Tensor, start: int, blocks: WeightBlocks) -> tuple[int, int]:
    """Returns the first group that has some of the values, and the number of groups from there to the last one."""
    size = blocks.height * blocks.width
    first = start // size
    return first, cdiv(start + values.numel(), size) - first
