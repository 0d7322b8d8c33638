"""Grouped products in fp8, one per expert: the definitions, in plain torch.

Rows are sorted by group (expert), and within a group by source (the rank whose tokens they are). The rows of one source
in one group are a segment: the rows of different micro-batches are in different segments, so that scales of segments
do not depend on how many micro-batches are computed at once.

A matrix [n, k] is quantised as it is (rows) and transposed (columns). The columns of each segment are padded with
zeros to a multiple of 128, so that a product over a segment reads whole blocks.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.core.ops.fp8.formats import BLOCK, scale_for
from megatron.core.ops.fp8.quantize import cast_scaled, largest_value, quantize_blocks
from megatron.core.ops.moe.grouped_linear import RowGroups, accumulate_grouped_product
from megatron.core.ops.precision import at_least_float32
from megatron.core.utils.warn import warn_on_first_rank


@dataclass(frozen=True)
class Segments:
    """The segments of rows [n, ...]."""

    counts: Tensor
    """int64 [segments]: number of rows of each segment, on the rows' device."""
    rows: int
    """Number of all rows."""
    per_group: int = 1
    """Number of segments of each group."""
    known_sizes: Sequence[int] | None = None
    """The counts on the host; None if they have not been read from the device yet."""

    @classmethod
    def of_rows(cls, groups: RowGroups, rows: int) -> "Segments":
        """Returns the segments of rows that are sorted by group and source."""
        if "segments" not in groups.derived:
            if groups.by_source is None or groups.by_source.shape[1] == 1:
                groups.derived["segments"] = cls(groups.counts, rows, 1, groups.sizes)
            else:
                groups.derived["segments"] = cls(groups.by_source.flatten(), rows, groups.by_source.shape[1])
        found: Segments = groups.derived["segments"]
        assert found.rows == rows
        return found

    @classmethod
    def of_weight(cls, weight: Tensor) -> "Segments":
        """Returns the segments of stacked weights [groups, out, in], read as a matrix [groups * out, in]: one for each
        group."""
        groups, out = weight.shape[:2]
        counts = torch.full((groups,), out, dtype=torch.int64, device=weight.device)
        return cls(counts, groups * out, 1, [out] * groups)

    @property
    def number(self) -> int:
        """Number of segments."""
        return self.counts.shape[0]

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.number // self.per_group

    @functools.cached_property
    def sizes(self) -> Sequence[int]:
        """Returns `counts` on the host. Waits for the device if they are not there yet."""
        return self.counts.tolist() if self.known_sizes is None else self.known_sizes

    @functools.cached_property
    def ends(self) -> Tensor:
        """Returns the end of each segment's rows, int32 [segments]. Does not wait for the device."""
        return self.counts.cumsum(0).to(torch.int32)

    @functools.cached_property
    def block_ends(self) -> Tensor:
        """Returns the end of each segment's blocks of 128 rows, int32 [segments]; the last one may be partly filled."""
        return ((self.counts + (BLOCK - 1)) // BLOCK).cumsum(0).to(torch.int32)

    @property
    def blocks(self) -> int:
        """Number of blocks; an upper limit of it if the host does not know the counts."""
        if self.known_sizes is not None:
            return sum(-(-size // BLOCK) for size in self.known_sizes)
        return self.rows // BLOCK + self.number

    @property
    def padded_rows(self) -> int:
        """Number of columns of a transposed matrix."""
        return self.blocks * BLOCK

    @functools.cached_property
    def of_blocks(self) -> Tensor:
        """Returns the segment of each block, int32 [blocks]; the number of segments for blocks behind the last."""
        index = torch.arange(self.blocks, dtype=torch.int32, device=self.counts.device)
        return torch.searchsorted(self.block_ends, index, right=True, out_int32=True)

    def ranges(self) -> Iterator[tuple[int, slice, slice]]:
        """Yields index, rows and columns of each segment that is not empty; its columns are not padded."""
        row = block = 0
        for number, size in enumerate(self.sizes):
            if size:
                yield number, slice(row, row + size), slice(block * BLOCK, block * BLOCK + size)
            row, block = row + size, block + -(-size // BLOCK)


@dataclass(frozen=True)
class QuantizedGroups:
    """An fp8 matrix of segments, and the factors that turn it back into the original values."""

    values: Tensor
    """fp8: rows [n, k], or columns [k, padded rows]. Contiguous."""
    factors: Tensor
    """float32: for `all` a scalar; for `segments` [segments]; for `blocks` [padded rows, k / 128] and [k, blocks]; for
    `squares` [blocks, k / 128] and [k / 128, blocks]."""
    scope: Literal["all", "segments", "blocks", "squares"]
    """Which values share a factor."""
    block: int = BLOCK
    """Elements along a side of a block; with fewer than 128, `blocks` have [padded rows, k / block] and [k, padded rows
    / block]."""


@dataclass(frozen=True)
class QuantizedGroupsPair:
    """A matrix [n, k] in the layouts that were asked for."""

    rows: QuantizedGroups | None
    """[n, k]"""
    columns: QuantizedGroups | None
    """[k, padded rows]"""


# ---------------------------------------------------------------------------------------------------------------------
# Quantisation


def largest_of_segments(matrix: Tensor, segments: Segments) -> Tensor:
    """Returns the largest absolute value of each segment of [n, k]: float32 [segments]; 0 for an empty one."""
    largest = torch.zeros(segments.number, dtype=torch.float32, device=matrix.device)
    for number, rows, _ in segments.ranges():
        largest[number] = largest_value(matrix[rows])
    return largest


def cast_segments(
    matrix: Tensor,
    dtype: torch.dtype,
    segments: Segments,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    seen: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns [n, k] times `row_scale` as fp8 [n, k], and times `column_scale` as fp8 [k, padded rows]; None for a
    scale of None.

    Scales are float32: scalars, or [segments]. Both have the same kind. `seen`, a float32 scalar, is raised to the
    largest absolute value of the matrix. Columns behind the last segment have no defined values.
    """
    n, k = matrix.shape
    rows = None if row_scale is None else torch.empty(n, k, dtype=dtype, device=matrix.device)
    columns = None
    if column_scale is not None:
        columns = torch.zeros(k, segments.padded_rows, dtype=torch.uint8, device=matrix.device).view(dtype)
    if seen is not None:
        seen.copy_(torch.maximum(seen, largest_value(matrix)))
    for number, part, padded in segments.ranges():
        scales = _scale_of(row_scale, number), _scale_of(column_scale, number)
        values, transposed = cast_scaled(matrix[part], dtype, *scales)
        if rows is not None and values is not None:
            rows[part] = values
        if columns is not None and transposed is not None:
            columns[:, padded] = transposed
    return rows, columns


def quantize_segments_by_largest(
    matrix: Tensor, dtype: torch.dtype, segments: Segments, margin: int, largest: Tensor, *, rows: bool, columns: bool
) -> QuantizedGroupsPair:
    """Returns [n, k] with one scale for each segment, which follows from its largest absolute value, float32
    [segments]; see `cast_segments`."""
    scale = scale_for(largest, dtype, margin)
    values, transposed = cast_segments(matrix, dtype, segments, scale if rows else None, scale if columns else None)
    return pair_of_segments(values, transposed, 1.0 / scale)


def pair_of_segments(values: Tensor | None, transposed: Tensor | None, factors: Tensor) -> QuantizedGroupsPair:
    """Returns the layouts that there are of a matrix with one factor, or with one for each segment."""
    scope: Literal["all", "segments"] = "segments" if factors.dim() else "all"
    return QuantizedGroupsPair(
        None if values is None else QuantizedGroups(values, factors, scope),
        None if transposed is None else QuantizedGroups(transposed, factors, scope),
    )


def _scale_of(scale: Tensor | None, number: int) -> Tensor | None:
    return scale if scale is None or scale.dim() == 0 else scale[number]


def quantize_segment_blocks(
    matrix: Tensor,
    dtype: torch.dtype,
    segments: Segments,
    margin: int,
    *,
    square: bool,
    rows: bool,
    columns: bool,
) -> QuantizedGroupsPair:
    """Returns [n, k] with a scale for each block, as `quantize.quantize_blocks` does for each segment.

    Factors of rows are [padded rows, k / 128]: those of a segment begin at its first block. Those of columns are [k,
    blocks]. With `square` they are [blocks, k / 128] and [k / 128, blocks]. Factors without rows are not defined.
    """
    (n, k), across, device = matrix.shape, -(-matrix.shape[1] // BLOCK), matrix.device
    values = torch.zeros(n, k, dtype=torch.uint8, device=device).view(dtype)
    transposed = torch.zeros(k, segments.padded_rows, dtype=torch.uint8, device=device).view(dtype)
    row_factors = torch.ones(segments.blocks if square else segments.padded_rows, across, device=device)
    column_factors = torch.ones(across if square else k, segments.blocks, device=device)
    for _, part, padded in segments.ranges():
        pair = quantize_blocks(matrix[part], dtype, margin, square=square, rows=rows, columns=columns)
        blocks = slice(padded.start // BLOCK, -(-padded.stop // BLOCK))
        if pair.rows is not None:
            values[part], row_factors[blocks if square else padded] = pair.rows.values, pair.rows.factors
        if pair.columns is not None:
            transposed[:, padded], column_factors[:, blocks] = pair.columns.values, pair.columns.factors
    return pair_of_blocks(values, row_factors, transposed, column_factors, square=square, rows=rows, columns=columns)


def pair_of_blocks(
    values: Tensor,
    row_factors: Tensor,
    transposed: Tensor,
    column_factors: Tensor,
    *,
    square: bool,
    rows: bool,
    columns: bool,
) -> QuantizedGroupsPair:
    """Returns the layouts that were asked for of a matrix with a scale for each block."""
    scope: Literal["blocks", "squares"] = "squares" if square else "blocks"
    return QuantizedGroupsPair(
        QuantizedGroups(values, row_factors, scope) if rows else None,
        QuantizedGroups(transposed, column_factors, scope) if columns else None,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Products


def product_of_groups(
    rows: QuantizedGroups,
    weight: QuantizedGroups,
    segments: Segments,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    precise: bool = True,
) -> Tensor:
    """Returns rows [n, k] times the transposed weight [out, k] of each row's group: [n, out], of the dequantised
    values, accumulated in float32 at least and rounded to `dtype`.

    Weights are the rows of stacked weights, [groups * out, k], or with `transposed` the columns of stacked weights
    [groups, k, out]: [out, groups * padded k]. `precise` has no effect.
    """
    if rows.values.is_cuda and dtype is not torch.float64:
        warn_on_first_rank("fp8: the products of experts are computed in plain torch, which is slow")
    wide = at_least_float32(dtype)
    k, height = rows.values.shape[1], weight.values.shape[0]
    own_rows = k if transposed else height // segments.groups
    output = torch.empty(
        rows.values.shape[0], height if transposed else own_rows, dtype=dtype, device=rows.values.device
    )
    weight_of = _wide_columns if transposed else _wide_rows
    for number, part, padded in segments.ranges():
        group = number // segments.per_group
        first = group * (-(-own_rows // BLOCK) * BLOCK if transposed else own_rows)
        first_block = group * -(-own_rows // BLOCK)
        matrix = weight_of(weight, slice(first, first + own_rows), group, first_block, wide)
        output[part] = (_wide_rows(rows, part, number, padded.start // BLOCK, wide) @ matrix.t()).to(dtype)
    return output


def accumulate_product_of_groups(
    total: Tensor, left: QuantizedGroups, right: QuantizedGroups, segments: Segments
) -> None:
    """Computes total[e] += left right^T over the columns of each group e, accumulated in the type of `total`: [out,
    padded rows], [in, padded rows] into [groups, out, in]."""
    for number, _, padded in segments.ranges():
        first_block = padded.start // BLOCK
        matrices = [_wide_columns(matrix, padded, number, first_block, total.dtype) for matrix in (left, right)]
        total[number // segments.per_group].addmm_(matrices[0], matrices[1].t())


def _wide_rows(matrix: QuantizedGroups, rows: slice, number: int, block: int, dtype: torch.dtype) -> Tensor:
    """Returns the rows of the segment `number`, whose first block is `block`."""
    values, factors = matrix.values[rows].to(dtype), matrix.factors.to(dtype)
    if matrix.scope == "blocks":
        own = factors[block * BLOCK : block * BLOCK + values.shape[0]]
    elif matrix.scope == "squares":
        own = factors[block : block + -(-values.shape[0] // BLOCK)]
    else:
        return values * (factors[number] if factors.dim() else factors)
    return values * _per_element(own, *values.shape, block=matrix.block)


def _wide_columns(matrix: QuantizedGroups, columns: slice, number: int, block: int, dtype: torch.dtype) -> Tensor:
    """Returns the columns of the segment `number`, whose first block is `block`."""
    values, factors = matrix.values[:, columns].to(dtype), matrix.factors.to(dtype)
    if matrix.scope in ("blocks", "squares"):
        first = block * (BLOCK // matrix.block)
        own = factors[:, first : first + -(-values.shape[1] // matrix.block)]
        return values * _per_element(own, *values.shape, block=matrix.block)
    return values * (factors[number] if factors.dim() else factors)


def _per_element(factors: Tensor, height: int, width: int, *, block: int) -> Tensor:
    """Expands factors of blocks to factors of elements, along each dimension that has fewer factors than elements."""
    if factors.shape[0] != height:
        factors = factors.repeat_interleave(block, 0)[:height]
    return factors if factors.shape[1] in (1, width) else factors.repeat_interleave(block, 1)[:, :width]


@dataclass(frozen=True)
class GroupedKernels:
    """The operations of grouped products in fp8, with the signatures of these functions."""

    largest: Callable[..., Tensor] = largest_of_segments
    cast: Callable[..., tuple[Tensor | None, Tensor | None]] = cast_segments
    quantize_blocks: Callable[..., QuantizedGroupsPair] = quantize_segment_blocks
    quantize_by_largest: Callable[..., QuantizedGroupsPair] = quantize_segments_by_largest
    product: Callable[..., Tensor] = product_of_groups
    accumulate: Callable[..., None] = accumulate_product_of_groups
    accumulate_rows: Callable[..., None] = accumulate_grouped_product
    """Adds weight gradients whose two factors are not quantised."""
