"""Matrices with one scale for each 32 elements: MXFP8, in plain torch.

Elements and scales are those of OCP Microscaling Formats (MX) v1.0: e4m3 or e5m2, and e8m0, powers of two from 2^-127
to 2^127. That text rounds a scale down, which cuts off the largest elements of some blocks. Here, as in Mishra et al.
2025 (arXiv:2506.08027), a scale is the smallest power of two with which no element exceeds the format's largest number.

A block lies along the dimension over which a product reduces. So a matrix and its transpose, weights too, have
different blocks, and each is rounded from the original.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.fp8.formats import BLOCK, cast, largest_finite
from megatron.core.ops.fp8.grouped import QuantizedGroups, QuantizedGroupsPair, Segments
from megatron.core.ops.fp8.quantize import Quantized, QuantizedPair
from megatron.core.ops.precision import widened

MX_BLOCK = 32
"""Elements with one scale."""
_LIMIT = 127
"""Largest exponent of a scale; the smallest is its negative."""


def mx_scale(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Returns the scales, float8_e8m0fnu, by which the elements of blocks with these largest absolute values are
    divided: NaN for one that is not finite."""
    fraction, exponent = torch.frexp(widened(amax))
    limit = torch.frexp(torch.tensor(largest_finite(dtype) * 2.0**-margin))
    # amax = fraction * 2^exponent with a fraction in [1/2, 1), so this power of two is found without rounding.
    power = exponent - limit.exponent + (fraction > limit.mantissa.to(fraction.device)).int()
    power = torch.where(amax == 0, -_LIMIT, power).clamp(-_LIMIT, _LIMIT)
    scale = torch.ldexp(torch.ones_like(amax, dtype=torch.float32), power)
    return torch.where(amax.isfinite(), scale, torch.nan).to(torch.float8_e8m0fnu)


def quantize_mx(matrix: Tensor, dtype: torch.dtype, margin: int = 0, *, rows: bool, columns: bool) -> QuantizedPair:
    """Returns [m, k] with a scale for each block of 1 x 32 elements along the last dimension of each layout. The last
    block of a row may be smaller."""
    return QuantizedPair(
        _by_rows(matrix, dtype, margin) if rows else None, _by_rows(matrix.t(), dtype, margin) if columns else None
    )


def _by_rows(matrix: Tensor, dtype: torch.dtype, margin: int) -> Quantized:
    blocks = in_blocks(matrix, MX_BLOCK)
    scale = mx_scale(blocks.abs().amax(2), dtype, margin)  # [m, blocks]
    values = cast(widened(blocks) / scale.float()[..., None], dtype).flatten(1)[:, : matrix.shape[1]]
    return Quantized(values.contiguous(), scale, MX_BLOCK)


def in_blocks(matrix: Tensor, block: int) -> Tensor:
    """Returns [m, k] as [m, blocks, block], with zeros at the end of each row."""
    return F.pad(matrix, (0, -matrix.shape[1] % block)).unflatten(1, (-1, block))


def quantize_segments(
    matrix: Tensor, segments: Segments, quantize: Callable[[Tensor, int], QuantizedPair]
) -> QuantizedGroupsPair:
    """Returns [n, k] with each segment quantised alone, by `quantize` of its rows and its number: factors of rows are
    [padded rows, k / block], those of columns [k, padded rows / block]. `quantize` returns the same layouts for each
    segment, and for no rows too."""
    empty = quantize(matrix[:0], 0)
    n, padded_rows = matrix.shape[0], segments.padded_rows
    rows = None if empty.rows is None else _room(empty.rows, (n, matrix.shape[1]), (padded_rows, -1))
    columns = None
    if empty.columns is not None:
        blocks = padded_rows // empty.columns.block
        columns = _room(empty.columns, (matrix.shape[1], padded_rows), (-1, blocks))
    for number, part, padded in segments.ranges():
        pair = quantize(matrix[part], number)
        if rows is not None and pair.rows is not None:
            rows.values[part] = pair.rows.values
            rows.factors[padded] = pair.rows.factors
        if columns is not None and pair.columns is not None:
            first = padded.start // pair.columns.block
            columns.values[:, padded] = pair.columns.values
            columns.factors[:, first : first + pair.columns.factors.shape[1]] = pair.columns.factors
    return QuantizedGroupsPair(rows, columns)


def _room(like: Quantized, values: tuple[int, int], factors: tuple[int, int]) -> QuantizedGroups:
    """Returns a matrix of zeros, and factors of one; -1 is the size of `like`."""
    assert BLOCK % like.block == 0  # a segment begins at a block
    shape = [own if size < 0 else size for size, own in zip(factors, like.factors.shape, strict=True)]
    device = like.values.device
    zeros = torch.zeros(values, dtype=torch.uint8, device=device).view(like.values.dtype)
    ones = torch.ones(shape, device=device).to(like.factors.dtype)
    return QuantizedGroups(zeros, ones, "blocks", like.block)
