"""Quantisation of matrices to fp8: the definitions, in plain torch.

A product reduces over the last dimension of both its operands, because Hopper's fp8 instructions read both along that
dimension. A matrix [m, k] that takes part in two products (an input in the output's and in the weight gradient's)
is therefore quantised twice: as it is (`rows`), and transposed (`columns`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.fp8.formats import BLOCK, cast, scale_for
from megatron.core.ops.precision import at_least_float32, widened


@dataclass(frozen=True)
class Quantized:
    """An fp8 matrix [m, k] and the factors that give its values back."""

    values: Tensor
    """fp8 [m, k], contiguous."""
    factors: Tensor
    """float32: [] for one factor, [m, 1] for one a row, [m, k / 128] for one a block of a row, [m / 128, k / 128] for
    one a square block. Counts of blocks are rounded up. Those of MXFP8 are float8_e8m0fnu, [m, k / 32]."""
    block: int = BLOCK
    """Elements along a side of a block."""


@dataclass(frozen=True)
class QuantizedPair:
    """A matrix [m, k] in the layouts that were asked for."""

    rows: Quantized | None
    """[m, k]"""
    columns: Quantized | None
    """[k, m]"""


def largest_value(matrix: Tensor) -> Tensor:
    """Returns the largest absolute value, a float32 scalar; NaN if there is one. 0 for an empty matrix."""
    if matrix.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=matrix.device)
    return matrix.abs().amax().float()


def note_largest(tensor: Tensor, largest: Tensor) -> None:
    """Notes the largest absolute value of a tensor, a scalar, or those of its rows, [n], which the kernel that computed
    the tensor found. The note is lost with the Python object: views and sums have none."""
    if not tensor.is_inference():
        tensor.noted_largest = largest, tensor._version  # type: ignore[attr-defined]


def noted_largest(tensor: Tensor) -> Tensor | None:
    """Returns the largest absolute value that was noted; None if there is none, or the tensor was written since."""
    return _noted(tensor, 0)


def noted_largest_of_rows(tensor: Tensor) -> Tensor | None:
    """Returns the largest absolute value of each row, [n], if they were noted; see `noted_largest`."""
    return _noted(tensor, 1)


def _noted(tensor: Tensor, dim: int) -> Tensor | None:
    largest, version = getattr(tensor, "noted_largest", (None, None))
    return largest if largest is not None and version == tensor._version and largest.dim() == dim else None


def cast_scaled(
    matrix: Tensor,
    dtype: torch.dtype,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    seen: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns [m, k] times `row_scale` as fp8 [m, k], and times `column_scale` as fp8 [k, m]; None for a scale of None.

    Scales are float32 scalars. `seen`, a float32 scalar, is raised to the largest absolute value of the matrix.
    """
    if seen is not None:
        seen.copy_(torch.maximum(seen, largest_value(matrix)))
    wide = widened(matrix)
    rows = columns = None
    if row_scale is not None:
        rows = cast(wide * row_scale, dtype)
    if column_scale is not None:
        columns = cast(wide * column_scale, dtype).t().contiguous()
    return rows, columns


def quantize_by_largest(
    matrix: Tensor, dtype: torch.dtype, margin: int, largest: Tensor, *, rows: bool, columns: bool
) -> QuantizedPair:
    """Returns [m, k] with one scale, which follows from the largest absolute value `largest`, a float32 scalar."""
    scale = scale_for(largest, dtype, margin)
    values, transposed = cast_scaled(matrix, dtype, scale if rows else None, scale if columns else None)
    return whole_pair(values, transposed, 1.0 / scale)


def whole_pair(values: Tensor | None, transposed: Tensor | None, factor: Tensor) -> QuantizedPair:
    """Returns the layouts of a matrix with one factor that there are."""
    return QuantizedPair(
        None if values is None else Quantized(values, factor),
        None if transposed is None else Quantized(transposed, factor),
    )


def quantize_blocks(
    matrix: Tensor, dtype: torch.dtype, margin: int, *, square: bool, rows: bool, columns: bool
) -> QuantizedPair:
    """Returns [m, k] with a scale for each block. Blocks have 1 x 128 elements along the dimension over which a product
    reduces; with `square`, 128 x 128. The last blocks may be smaller."""
    if square:
        factors, quantized = _by_squares(matrix, dtype, margin)
        return QuantizedPair(
            Quantized(quantized, factors) if rows else None,
            Quantized(quantized.t().contiguous(), factors.t().contiguous()) if columns else None,
        )
    return QuantizedPair(
        _by_row_blocks(matrix, dtype, margin) if rows else None,
        _by_row_blocks(matrix.t(), dtype, margin) if columns else None,
    )


def _by_row_blocks(matrix: Tensor, dtype: torch.dtype, margin: int) -> Quantized:
    m, k = matrix.shape
    blocks = _padded(matrix, 1, BLOCK).unflatten(1, (-1, BLOCK))  # [m, blocks, 128]
    scale = scale_for(blocks.abs().amax(2), dtype, margin)  # [m, blocks]
    values = cast(widened(blocks) * scale[..., None], dtype).view(m, -1)[:, :k].contiguous()
    return Quantized(values, 1.0 / scale)


def _by_squares(matrix: Tensor, dtype: torch.dtype, margin: int) -> tuple[Tensor, Tensor]:
    m, k = matrix.shape
    padded = _padded(matrix, BLOCK, BLOCK)
    squares = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [m blocks, 128, k blocks, 128]
    scale = scale_for(squares.abs().amax((1, 3)), dtype, margin)  # [m blocks, k blocks]
    values = cast(widened(squares) * scale[:, None, :, None], dtype).view(padded.shape)
    return 1.0 / scale, values[:m, :k].contiguous()


def _padded(matrix: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    m, k = matrix.shape
    return F.pad(matrix, (0, -k % column_multiple, 0, -m % row_multiple))


def dequantize(matrix: Quantized, dtype: torch.dtype) -> Tensor:
    """Returns the values [m, k] in the wider of float32 and `dtype`."""
    wide = at_least_float32(dtype)
    values, factors = matrix.values.to(wide), matrix.factors.to(wide)
    if factors.dim():
        m, k = values.shape
        if factors.shape[0] != m:
            factors = factors.repeat_interleave(matrix.block, 0)[:m]
        if factors.shape[1] > 1:
            factors = factors.repeat_interleave(matrix.block, 1)[:, :k]
    return values * factors
