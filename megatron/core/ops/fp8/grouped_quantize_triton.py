"""Quantisation of segments of rows to fp8 on a GPU: each kernel reads a matrix once and writes both layouts.

A program has one block of 128 rows of one segment. It finds the segment in a table, so that the host need not know how
many rows a segment has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.fp8 import grouped
from megatron.core.ops.fp8.formats import BLOCK, largest_finite
from megatron.core.ops.fp8.grouped import QuantizedGroupsPair, Segments, pair_of_blocks, pair_of_segments
from megatron.core.ops.fp8.quantize_triton import (
    as_fp8,
    bits_of_size,
    has_kernel,
    quantize_lines,
    scale_of,
    with_plain_rows,
)
from megatron.core.ops.tiles import cdiv, next_power_of_2

_COLUMNS = 64
"""Columns of a program that casts."""
_AT_ONCE = 128
"""Columns that a program of the largest values reads at once."""


@triton.jit
def place_of_block(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    block, of_blocks, ends, block_ends, number, BLOCK: tl.constexpr
):
    """Returns the segment of a block, its first row, and the end of the segment's rows. Blocks behind the last segment
    have no rows."""
    found = tl.load(of_blocks + block)
    segment = tl.minimum(found, number - 1)
    start = tl.load(ends + segment - 1, mask=segment > 0, other=0)
    first_block = tl.load(block_ends + segment - 1, mask=segment > 0, other=0)
    end = tl.load(ends + segment)
    return segment, start + (block - first_block) * BLOCK, tl.where(found < number, end, 0)


@triton.jit
def _largest_kernel(  # type: ignore[no-untyped-def]
    largest, matrix, of_blocks, ends, block_ends, number, k, stride, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    segment, first, end = place_of_block(tl.program_id(0), of_blocks, ends, block_ends, number, BLOCK)
    if first < end:
        row = first.to(tl.int64) + tl.arange(0, BLOCK)
        size = tl.zeros((BLOCK, COLUMNS), tl.int32)
        for start in range(0, k, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            valid = (row < end)[:, None] & (column < k)[None, :]
            x = tl.load(matrix + row[:, None] * stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
            size = tl.maximum(size, bits_of_size(x))
        tl.atomic_max(largest + segment, tl.max(tl.max(size, 1), 0))


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    rows, words, seen, factors, matrix, given, of_blocks, ends, block_ends, number, blocks, k, stride,
    limit, reach,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SEEN: tl.constexpr, SCALE: tl.constexpr, E5M2: tl.constexpr,
    BLOCK: tl.constexpr, TILE_K: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Casts groups of four rows, whose bytes make 32-bit words of the transposed matrix. SCALE: 0 one for all, 1 one
    for a segment. With `factors`, `given` has the largest absolute value of each segment, and the first program writes
    the factors that give values back."""
    if factors is not None:
        is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        if is_first:
            every = tl.arange(0, SEGMENTS)
            scales = scale_of(tl.load(given + every, mask=every < number, other=0.0), reach)
            tl.store(factors + every, tl.div_rn(tl.full((SEGMENTS,), 1.0, tl.float32), scales), mask=every < number)
    segment, first, end = place_of_block(tl.program_id(0), of_blocks, ends, block_ends, number, BLOCK)
    if first < end:
        group = tl.arange(0, BLOCK // 4)
        column = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
        if SEEN:
            before = tl.load(seen)
        scale = tl.load(given + (segment if SCALE == 1 else 0))
        if factors is not None:
            scale = scale_of(scale, reach)
        size = tl.zeros((BLOCK // 4, TILE_K), tl.int32)
        word = tl.zeros((BLOCK // 4, TILE_K), tl.uint32)
        for index in tl.static_range(4):
            row = first.to(tl.int64) + group * 4 + index
            valid = (row < end)[:, None] & (column < k)[None, :]
            x = tl.load(matrix + row[:, None] * stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
            if SEEN:
                size = tl.maximum(size, bits_of_size(x))
            fp8 = as_fp8(x * scale, limit, E5M2)
            if ROWS:
                tl.store(rows + row[:, None] * k + column[None, :], fp8, mask=valid)
            word |= fp8.to(tl.uint32) << (8 * index)
        if COLUMNS:
            transposed = tl.trans(word.to(tl.int32, bitcast=True))
            at = column.to(tl.int64)[:, None] * (blocks * (BLOCK // 4)) + tl.program_id(0) * (BLOCK // 4)
            tl.store(words + at + group[None, :], transposed, mask=(column < k)[:, None])
        if SEEN:
            largest = tl.max(tl.max(size, 1), 0)
            if largest > before:  # for few tiles: atomic operations on one address are slow
                tl.atomic_max(seen, largest)


@triton.jit
def _lines_kernel(  # type: ignore[no-untyped-def]
    rows, row_factors, words, column_factors, matrix, of_blocks, ends, block_ends, number, blocks, k, stride, limit,
    reach, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, first, end = place_of_block(tl.program_id(0), of_blocks, ends, block_ends, number, BLOCK)
    if first < end:
        quantize_lines(
            rows, row_factors + (across * blocks + block) * BLOCK, words + block * (BLOCK // 4),
            column_factors + block * k + across * BLOCK, matrix, first, end, across * BLOCK, k, stride,
            blocks * (BLOCK // 4), BLOCK // 4, limit, reach, ROWS, COLUMNS, E5M2, BLOCK,
        )  # fmt: skip


@triton.jit
def _squares_kernel(  # type: ignore[no-untyped-def]
    rows, row_factors, columns, column_factors, matrix, of_blocks, ends, block_ends, number, blocks, k, stride, limit,
    reach, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, across = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, first, end = place_of_block(tl.program_id(0), of_blocks, ends, block_ends, number, BLOCK)
    if first < end:
        row = first.to(tl.int64) + tl.arange(0, BLOCK)
        column = across * BLOCK + tl.arange(0, BLOCK)
        valid = (row < end)[:, None] & (column < k)[None, :]
        x = tl.load(matrix + row[:, None] * stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        scale = scale_of(tl.max(bits_of_size(x)).to(tl.float32, bitcast=True), reach)
        fp8 = as_fp8(x * scale, limit, E5M2)
        one = tl.full((), 1.0, tl.float32)
        if ROWS:
            tl.store(rows + row[:, None] * k + column[None, :], fp8, mask=valid)
            tl.store(row_factors + block * tl.num_programs(1) + across, tl.div_rn(one, scale))
        if COLUMNS:
            to_column = columns + column.to(tl.int64)[:, None] * (blocks * BLOCK) + block * BLOCK
            to_column += tl.arange(0, BLOCK)[None, :]
            tl.store(to_column, tl.trans(fp8), mask=(column < k)[:, None])
            tl.store(column_factors + across * blocks + block, tl.div_rn(one, scale))


def largest_of_segments_triton(matrix: Tensor, segments: Segments) -> Tensor:
    """Does `grouped.largest_of_segments` in one kernel; leaves float64 to the definition."""
    if not has_kernel(matrix):
        return grouped.largest_of_segments(matrix, segments)
    largest = torch.zeros(segments.number, dtype=torch.float32, device=matrix.device)
    matrix = with_plain_rows(matrix)
    _largest_kernel[(segments.blocks,)](
        largest.view(torch.int32), matrix, segments.of_blocks, segments.ends, segments.block_ends, segments.number,
        matrix.shape[1], matrix.stride(0), BLOCK=BLOCK, COLUMNS=_AT_ONCE, num_warps=8,
    )  # fmt: skip
    return largest


def cast_segments_triton(
    matrix: Tensor,
    dtype: torch.dtype,
    segments: Segments,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    seen: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Does `grouped.cast_segments` in one kernel. Both layouts must have the same scales. Leaves float64 to the
    definition."""
    if not has_kernel(matrix):
        return grouped.cast_segments(matrix, dtype, segments, row_scale, column_scale, seen)
    return _cast(matrix, dtype, segments, row_scale, column_scale, seen, None, 0.0)


def quantize_segments_by_largest_triton(
    matrix: Tensor, dtype: torch.dtype, segments: Segments, margin: int, largest: Tensor, *, rows: bool, columns: bool
) -> QuantizedGroupsPair:
    """Does `grouped.quantize_segments_by_largest` in one kernel; leaves float64 to the definition."""
    if not has_kernel(matrix):
        wanted = {"rows": rows, "columns": columns}
        return grouped.quantize_segments_by_largest(matrix, dtype, segments, margin, largest, **wanted)
    factors, reach = torch.empty_like(largest), largest_finite(dtype) * 2.0**-margin
    scales = largest if rows else None, largest if columns else None
    return pair_of_segments(*_cast(matrix, dtype, segments, *scales, None, factors, reach), factors)


def _cast(
    matrix: Tensor,
    dtype: torch.dtype,
    segments: Segments,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    seen: Tensor | None,
    factors: Tensor | None,
    reach: float,
) -> tuple[Tensor | None, Tensor | None]:
    """Casts by scales. With `factors` the scales are the largest value of each segment, from which the scale of the
    range `reach` follows; its inverse is written to `factors`."""
    matrix, (n, k) = with_plain_rows(matrix), matrix.shape
    given = row_scale if row_scale is not None else column_scale
    assert given is not None
    device = matrix.device
    rows = None if row_scale is None else torch.empty(n, k, dtype=dtype, device=device)
    columns = None if column_scale is None else torch.empty(k, segments.padded_rows, dtype=dtype, device=device)
    _cast_kernel[(segments.blocks, cdiv(k, _COLUMNS))](
        None if rows is None else rows.view(torch.uint8),
        None if columns is None else columns.view(torch.int32),
        None if seen is None else seen.view(torch.int32),
        factors,
        matrix,
        given,
        segments.of_blocks,
        segments.ends,
        segments.block_ends,
        segments.number,
        segments.blocks,
        k,
        matrix.stride(0),
        largest_finite(dtype),
        reach,
        ROWS=rows is not None,
        COLUMNS=columns is not None,
        SEEN=seen is not None,
        SCALE=given.dim(),
        E5M2=dtype is torch.float8_e5m2,
        BLOCK=BLOCK,
        TILE_K=_COLUMNS,
        SEGMENTS=next_power_of_2(segments.number),
        num_warps=4,
    )
    return rows, columns


def quantize_segment_blocks_triton(
    matrix: Tensor,
    dtype: torch.dtype,
    segments: Segments,
    margin: int,
    *,
    square: bool,
    rows: bool,
    columns: bool,
) -> QuantizedGroupsPair:
    """Does `grouped.quantize_segment_blocks` in one kernel; leaves float64 to the definition."""
    wanted = {"square": square, "rows": rows, "columns": columns}
    if not has_kernel(matrix):
        return grouped.quantize_segment_blocks(matrix, dtype, segments, margin, **wanted)
    matrix, (n, k) = with_plain_rows(matrix), matrix.shape
    across, device = cdiv(k, BLOCK), matrix.device
    values = torch.empty(n, k, dtype=dtype, device=device)
    transposed = torch.empty(k, segments.padded_rows, dtype=dtype, device=device)
    shapes = (
        ((segments.blocks, across), (across, segments.blocks))
        if square
        else ((across, segments.padded_rows), (segments.blocks, k))
    )
    factors, transposed_factors = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    kernel = _squares_kernel if square else _lines_kernel
    kernel[(segments.blocks, across)](
        values.view(torch.uint8),
        factors,
        transposed.view(torch.uint8 if square else torch.int32),
        transposed_factors,
        matrix,
        segments.of_blocks,
        segments.ends,
        segments.block_ends,
        segments.number,
        segments.blocks,
        k,
        matrix.stride(0),
        largest_finite(dtype),
        largest_finite(dtype) * 2.0**-margin,
        ROWS=rows,
        COLUMNS=columns,
        E5M2=dtype is torch.float8_e5m2,
        BLOCK=BLOCK,
        num_warps=8,
    )
    if not square:
        factors, transposed_factors = factors.t(), transposed_factors.t()
    return pair_of_blocks(values, factors, transposed, transposed_factors, **wanted)
