"""Quantisation to fp8 on a GPU: each kernel reads a matrix once and writes both layouts.

Every rounding is that of the definitions in `quantize`. Largest values are compared as integers: of two non-negative
floats the larger one has the larger bits, and those of NaN are larger still.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.fp8 import quantize
from megatron.core.ops.fp8.formats import BLOCK, largest_finite
from megatron.core.ops.fp8.quantize import Quantized, QuantizedPair, whole_pair
from megatron.core.ops.sum_rows_triton import num_multiprocessors
from megatron.core.ops.tiles import cdiv

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_TILE = 128
_TRANSPOSED_TILE = (64, 128)
"""Rows and columns of a program's tile, if it is transposed too."""
_PLAIN_TILE = (32, 512)
_GROUPS = 32
_GROUP_COLUMNS = 64
_GROUP_WARPS = 4
"""Groups of four rows, columns, and warps of a program that casts both layouts."""
_AT_ONCE = 4096
"""Elements that a program of the largest value reads at once."""
_PROGRAMS = 8
"""Programs of the largest value for each multiprocessor."""


@triton.jit
def bits_of_size(x):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """Returns the bits of |x|, float32, as an integer that orders like |x|."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_largest(largest, before, size):  # type: ignore[no-untyped-def]
    """Raises `largest` to the bits `size` [n], as found by this program; `before` was seen when the program began."""
    found = tl.max(size, 0)
    if found > before:  # for few programs: atomic operations on one address are slow
        tl.atomic_max(largest, found)


@triton.jit
def as_fp8(x, limit, E5M2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the bits of x in fp8: limited to the range, with NaN for what is not finite."""
    limited = tl.minimum(tl.maximum(x, -limit), limit)
    fp8 = (limited.to(tl.float8e5) if E5M2 else limited.to(tl.float8e4nv)).to(tl.uint8, bitcast=True)
    return tl.where(bits_of_size(x) < 0x7F800000, fp8, 0x7F).to(tl.uint8)  # 0x7F is NaN in both formats


@triton.jit
def _largest_kernel(largest, values, count, steps, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    size = tl.zeros((AT_ONCE,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * steps * AT_ONCE
    for step in range(steps):
        at = first + step * AT_ONCE + tl.arange(0, AT_ONCE)
        size = tl.maximum(size, bits_of_size(tl.load(values + at, mask=at < count, other=0.0).to(tl.float32)))
    tl.atomic_max(largest, tl.max(size, 0))


@triton.jit
def scale_of(size, reach):  # type: ignore[no-untyped-def]
    """Returns the scale of values of which `size` is the largest absolute one, as `formats.scale_for`."""
    scale = tl.div_rn(reach, size)
    scale = tl.where(scale == float("inf"), 3.4028234663852886e38, scale)
    return tl.where(size == 0.0, 1.0, scale)


@triton.jit
def _scale_of_whole(scale, factor, reach):  # type: ignore[no-untyped-def]
    """Returns the scale of a whole matrix. With `factor`, `scale` has its largest absolute value, and the first program
    writes the factor that gives values back."""
    found = tl.load(scale)
    if factor is not None:
        found = scale_of(found, reach)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(factor, tl.div_rn(tl.full((), 1.0, tl.float32), found))
    return found


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    rows, columns, seen, factor, matrix, given, m, k, stride, limit, reach,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SEEN: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    valid = (row < m)[:, None] & (column < k)[None, :]
    if SEEN:
        before = tl.load(seen)
    x = tl.load(matrix + row[:, None] * stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    if SEEN:
        size = tl.max(tl.max(bits_of_size(x), 1), 0)
        if size > before:  # for few tiles: atomic operations on one address are slow
            tl.atomic_max(seen, size)
    fp8 = as_fp8(x * _scale_of_whole(given, factor, reach), limit, E5M2)
    if ROWS:
        tl.store(rows + row[:, None] * k + column[None, :], fp8, mask=valid)
    if COLUMNS:
        to = columns + column.to(tl.int64)[:, None] * m + row[None, :]
        tl.store(to, tl.trans(fp8), mask=(column < k)[:, None] & (row < m)[None, :])


@triton.jit
def _cast_both_kernel(  # type: ignore[no-untyped-def]
    rows, words, seen, factor, matrix, given, m, k, stride, limit, reach,
    SEEN: tl.constexpr, E5M2: tl.constexpr, GROUPS: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Casts groups of four rows, whose bytes make the 32-bit words of the transposed matrix: words move through shared
    memory several times faster than bytes."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    column = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    valid = (group * 4 < m)[:, None] & (column < k)[None, :]
    if SEEN:
        before = tl.load(seen)
    scale = _scale_of_whole(given, factor, reach)
    size = tl.zeros((GROUPS, TILE_K), tl.int32)
    word = tl.zeros((GROUPS, TILE_K), tl.uint32)
    for number in tl.static_range(4):
        row = group * 4 + number
        x = tl.load(matrix + row[:, None] * stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        if SEEN:
            size = tl.maximum(size, bits_of_size(x))
        fp8 = as_fp8(x * scale, limit, E5M2)
        tl.store(rows + row[:, None] * k + column[None, :], fp8, mask=valid)
        word |= fp8.to(tl.uint32) << (8 * number)
    transposed = tl.trans(word.to(tl.int32, bitcast=True))
    to = words + column.to(tl.int64)[:, None] * (m // 4) + group[None, :]
    tl.store(to, transposed, mask=(column < k)[:, None] & (group * 4 < m)[None, :])
    if SEEN:
        largest = tl.max(tl.max(size, 1), 0)
        if largest > before:  # for few tiles: atomic operations on one address are slow
            tl.atomic_max(seen, largest)


@triton.jit
def _read_rows(matrix, row, column, end, k, stride):  # type: ignore[no-untyped-def]
    """Returns rows [g] of the matrix in float32, [g, columns]; 0 behind `end` and k."""
    inside = (row < end)[:, None] & (column < k)[None, :]
    return tl.load(matrix + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_row(rows, row, column, end, k, x, scale, limit, E5M2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Casts rows [g] of the matrix by their scales [g] and writes them."""
    inside = (row < end)[:, None] & (column < k)[None, :]
    tl.store(rows + row[:, None] * k + column[None, :], as_fp8(x * scale[:, None], limit, E5M2), mask=inside)


@triton.jit
def quantize_lines(  # type: ignore[no-untyped-def]
    rows, row_factors, words, column_factors, matrix, first, end, first_column, k, stride, word_stride, num_words,
    limit, reach, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantises a block of BLOCK rows from `first` and columns from `first_column` by lines. `words` and the factors
    are those of this block: words of the transposed block [columns, rows / 4], factors of rows and of columns.

    Groups of four rows are read, whose bytes make the 32-bit words of the transposed matrix.
    """
    group, column, line = tl.arange(0, BLOCK // 4), first_column + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    row = first.to(tl.int64) + group * 4
    x0, x1 = _read_rows(matrix, row, column, end, k, stride), _read_rows(matrix, row + 1, column, end, k, stride)
    x2, x3 = _read_rows(matrix, row + 2, column, end, k, stride), _read_rows(matrix, row + 3, column, end, k, stride)
    one = tl.full((BLOCK,), 1.0, tl.float32)
    # Many threads have the largest value of the same line. In one vector, each thread has one line to divide for.
    if ROWS:
        even = tl.join(tl.max(bits_of_size(x0), 1), tl.max(bits_of_size(x2), 1))
        odd = tl.join(tl.max(bits_of_size(x1), 1), tl.max(bits_of_size(x3), 1))
        sizes = tl.gather(tl.join(even, odd).reshape(BLOCK), line, 0)
        scale = scale_of(sizes.to(tl.float32, bitcast=True), reach)
        tl.store(row_factors + line, tl.div_rn(one, scale), mask=first + line < end)
        _store_row(rows, row, column, end, k, x0, tl.gather(scale, group * 4, 0), limit, E5M2)
        _store_row(rows, row + 1, column, end, k, x1, tl.gather(scale, group * 4 + 1, 0), limit, E5M2)
        _store_row(rows, row + 2, column, end, k, x2, tl.gather(scale, group * 4 + 2, 0), limit, E5M2)
        _store_row(rows, row + 3, column, end, k, x3, tl.gather(scale, group * 4 + 3, 0), limit, E5M2)
    if COLUMNS:
        even = tl.maximum(bits_of_size(x0), bits_of_size(x2))
        size = tl.max(tl.maximum(even, tl.maximum(bits_of_size(x1), bits_of_size(x3))), 0)
        scale = scale_of(tl.gather(size, line, 0).to(tl.float32, bitcast=True), reach)
        tl.store(column_factors + line, tl.div_rn(one, scale), mask=column < k)
        scale = tl.gather(scale, line, 0)[None, :]
        word = as_fp8(x0 * scale, limit, E5M2).to(tl.uint32) | (as_fp8(x1 * scale, limit, E5M2).to(tl.uint32) << 8)
        word |= as_fp8(x2 * scale, limit, E5M2).to(tl.uint32) << 16
        word |= as_fp8(x3 * scale, limit, E5M2).to(tl.uint32) << 24
        to_column = words + column.to(tl.int64)[:, None] * word_stride + group[None, :]
        inside = (column < k)[:, None] & (group < num_words)[None, :]
        tl.store(to_column, tl.trans(word.to(tl.int32, bitcast=True)), mask=inside)


@triton.jit
def _lines_kernel(  # type: ignore[no-untyped-def]
    rows, row_factors, words, column_factors, matrix, m, k, stride, word_stride, limit, reach,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first = down * BLOCK
    quantize_lines(
        rows, row_factors + across * m + first, words + down * (BLOCK // 4), column_factors + down * k + across * BLOCK,
        matrix, first, m, across * BLOCK, k, stride, word_stride, word_stride - down * (BLOCK // 4), limit, reach,
        ROWS, COLUMNS, E5M2, BLOCK,
    )  # fmt: skip


@triton.jit
def _squares_kernel(  # type: ignore[no-untyped-def]
    rows, row_factors, columns, column_factors, matrix, m, k, stride, limit, reach,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block_row, block_column = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = block_row * BLOCK + tl.arange(0, BLOCK)
    column = block_column * BLOCK + tl.arange(0, BLOCK)
    valid = (row < m)[:, None] & (column < k)[None, :]
    x = tl.load(matrix + row[:, None] * stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(bits_of_size(x)).to(tl.float32, bitcast=True), reach)
    fp8 = as_fp8(x * scale, limit, E5M2)
    one = tl.full((), 1.0, tl.float32)
    if ROWS:
        tl.store(rows + row[:, None] * k + column[None, :], fp8, mask=valid)
        tl.store(row_factors + block_row * tl.num_programs(1) + block_column, tl.div_rn(one, scale))
    if COLUMNS:
        to_column = columns + column[:, None] * m + row[None, :]
        tl.store(to_column, tl.trans(fp8), mask=(column < k)[:, None] & (row < m)[None, :])
        tl.store(column_factors + block_column * tl.num_programs(0) + block_row, tl.div_rn(one, scale))


def largest_value_triton(matrix: Tensor) -> Tensor:
    """Does `quantize.largest_value` in one kernel; leaves float64 to the definition."""
    if not has_kernel(matrix):
        return quantize.largest_value(matrix)
    matrix, count = matrix.contiguous(), matrix.numel()
    largest = torch.zeros((), dtype=torch.float32, device=matrix.device)
    steps = cdiv(count, _AT_ONCE * _PROGRAMS * num_multiprocessors(matrix.device))
    grid = (cdiv(count, _AT_ONCE * steps),)
    _largest_kernel[grid](largest.view(torch.int32), matrix, count, steps, AT_ONCE=_AT_ONCE, num_warps=8)
    return largest


def cast_scaled_triton(
    matrix: Tensor,
    dtype: torch.dtype,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    seen: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Does `quantize.cast_scaled` in one kernel. Both layouts must have the same scale. Leaves float64 to the
    definition."""
    if not has_kernel(matrix):
        return quantize.cast_scaled(matrix, dtype, row_scale, column_scale, seen)
    return _cast(matrix, dtype, row_scale, column_scale, seen, None, 0.0)


def quantize_by_largest_triton(
    matrix: Tensor, dtype: torch.dtype, margin: int, largest: Tensor, *, rows: bool, columns: bool
) -> QuantizedPair:
    """Does `quantize.quantize_by_largest` in one kernel; leaves float64 to the definition."""
    if not has_kernel(matrix):
        return quantize.quantize_by_largest(matrix, dtype, margin, largest, rows=rows, columns=columns)
    factor = torch.empty((), dtype=torch.float32, device=matrix.device)
    reach = largest_finite(dtype) * 2.0**-margin
    values, transposed = _cast(
        matrix, dtype, largest if rows else None, largest if columns else None, None, factor, reach
    )
    return whole_pair(values, transposed, factor)


def _cast(
    matrix: Tensor,
    dtype: torch.dtype,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    seen: Tensor | None,
    factor: Tensor | None,
    reach: float,
) -> tuple[Tensor | None, Tensor | None]:
    """Casts by scales. With `factor` the scales are the largest value of the matrix, from which the scale of the range
    `reach` follows; its inverse is written to `factor`."""
    matrix = with_plain_rows(matrix)
    m, k = matrix.shape
    given = row_scale if row_scale is not None else column_scale
    assert given is not None
    rows = _empty_fp8(matrix, m, k, dtype) if row_scale is not None else None
    columns = _empty_fp8(matrix, k, m, dtype) if column_scale is not None else None
    if rows is not None and columns is not None and m % 4 == 0:
        _cast_both_kernel[cdiv(m, 4 * _GROUPS), cdiv(k, _GROUP_COLUMNS)](
            rows.view(torch.uint8),
            columns.view(torch.int32),
            given if seen is None else seen.view(torch.int32),
            factor,
            matrix,
            given,
            m,
            k,
            matrix.stride(0),
            largest_finite(dtype),
            reach,
            SEEN=seen is not None,
            E5M2=dtype is torch.float8_e5m2,
            GROUPS=_GROUPS,
            TILE_K=_GROUP_COLUMNS,
            num_warps=_GROUP_WARPS,
        )
        return rows, columns
    tile_m, tile_k = _TRANSPOSED_TILE if columns is not None else _PLAIN_TILE
    grid = (cdiv(m, tile_m), cdiv(k, tile_k))
    _cast_kernel[grid](
        _bytes(rows, matrix),
        _bytes(columns, matrix),
        given if seen is None else seen.view(torch.int32),
        factor,
        matrix,
        given,
        m,
        k,
        matrix.stride(0),
        largest_finite(dtype),
        reach,
        ROWS=rows is not None,
        COLUMNS=columns is not None,
        SEEN=seen is not None,
        E5M2=dtype is torch.float8_e5m2,
        TILE_M=tile_m,
        TILE_K=tile_k,
        num_warps=4 if columns is not None else 8,
    )
    return rows, columns


def quantize_blocks_triton(
    matrix: Tensor, dtype: torch.dtype, margin: int, *, square: bool, rows: bool, columns: bool
) -> QuantizedPair:
    """Does `quantize.quantize_blocks` in one kernel; leaves float64 to the definition."""
    if not has_kernel(matrix):
        return quantize.quantize_blocks(matrix, dtype, margin, square=square, rows=rows, columns=columns)
    matrix = with_plain_rows(matrix)
    m, k = matrix.shape
    down, across, device = cdiv(m, BLOCK), cdiv(k, BLOCK), matrix.device
    types, limit = {"E5M2": dtype is torch.float8_e5m2, "BLOCK": BLOCK, "num_warps": 8}, largest_finite(dtype)
    types |= {"ROWS": rows, "COLUMNS": columns}
    values = _empty_fp8(matrix, m, k, dtype)
    # cuBLAS reads the factors of blocks in rows with the longer side of the matrix contiguous.
    shapes = ((down, across), (across, down)) if square else ((across, m), (down, k))
    factors, transposed_factors = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    given = matrix, m, k, matrix.stride(0)
    if square:
        transposed = _empty_fp8(matrix, k, m, dtype)
        to = _bytes(values, matrix), factors, _bytes(transposed, matrix), transposed_factors
        _squares_kernel[(down, across)](*to, *given, limit, limit * 2.0**-margin, **types)
    else:
        words = cdiv(m, 4)
        transposed = _empty_fp8(matrix, k, 4 * words, dtype)
        to = _bytes(values, matrix), factors, transposed.view(torch.int32), transposed_factors
        _lines_kernel[(down, across)](*to, *given, words, limit, limit * 2.0**-margin, **types)
        transposed = transposed[:, :m].contiguous()
        factors, transposed_factors = factors.t(), transposed_factors.t()
    return QuantizedPair(
        Quantized(values, factors) if rows else None, Quantized(transposed, transposed_factors) if columns else None
    )


def has_kernel(matrix: Tensor) -> bool:
    """Whether the kernels can read a matrix: it has elements, and they are not float64."""
    return matrix.dtype in _KERNEL_TYPES and matrix.numel() > 0


def with_plain_rows(matrix: Tensor) -> Tensor:
    """Returns the matrix [n, k] with the elements of each row next to each other in memory; a copy only if needed."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _empty_fp8(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device=like.device)


def _bytes(fp8: Tensor | None, other: Tensor) -> Any:
    """Returns the bytes of an fp8 tensor for a kernel; for None, a tensor that the kernel does not touch."""
    return other if fp8 is None else fp8.view(torch.uint8)
