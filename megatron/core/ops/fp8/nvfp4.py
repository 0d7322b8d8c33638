"""NVFP4 in plain torch: numbers of 4 bits (e2m1), a scale in e4m3 for each 16 of them, and one in float32 for a tensor.

As in NVIDIA 2025 (arXiv:2509.25149): weights have blocks of 16 x 16, so that a weight and its transpose are the same
numbers; before the product of a weight gradient both operands are rotated along the tokens (`rotate`), which spreads
outliers. The paper rounds gradients stochastically. Here all is rounded to nearest, ties to even, so that a result does
not depend on the layout.
"""

import torch
from torch import Tensor

from megatron.core.ops.fp8.formats import cast
from megatron.core.ops.fp8.microscaling import in_blocks
from megatron.core.ops.fp8.quantize import Quantized, QuantizedPair, largest_value
from megatron.core.ops.precision import widened

NV_BLOCK = 16
"""Elements with one scale, and the rows and columns of a block of weights with one scale."""
_LARGEST = 6.0
"""Largest number of e2m1, whose other sizes are 0, 0.5, 1, 1.5, 2, 3 and 4."""
_LARGEST_SCALE = 448.0
_SIGNS = (1, -1, 1, 1, -1, 1, 1, 1, -1, -1, 1, -1, 1, -1, -1, -1)
"""Drawn once: the paper uses one vector of signs for all layers and steps."""


def round_e2m1(values: Tensor) -> Tensor:
    """Returns the nearest numbers of e2m1, in the type of `values`: ties to even, larger ones become 6 or -6."""
    size = values.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(values.dtype)
    # The steps are those between a number and the next, so the even multiple has an even code.
    return ((size / step).round() * step).clamp(max=_LARGEST).copysign(values)


def rotate(matrix: Tensor) -> Tensor:
    """Returns [m, k] with each 16 neighbours of a row multiplied by an orthogonal matrix: random signs, then the
    Hadamard matrix. Rows of two matrices that are rotated have the same products. Neighbours that are fewer than 16
    stay."""
    wide = widened(matrix)
    whole = matrix.shape[1] // NV_BLOCK * NV_BLOCK
    hadamard = torch.ones(1, 1, dtype=wide.dtype, device=wide.device)
    two = torch.tensor([[1, 1], [1, -1]], dtype=wide.dtype, device=wide.device)
    while hadamard.shape[0] < NV_BLOCK:
        hadamard = torch.kron(two, hadamard)
    turn = hadamard * torch.tensor(_SIGNS, dtype=wide.dtype, device=wide.device)[:, None] / NV_BLOCK**0.5
    rotated = (wide[:, :whole].unflatten(1, (-1, NV_BLOCK)) @ turn).flatten(1)
    return torch.cat([rotated, wide[:, whole:]], 1)


def largest_of_layouts(matrix: Tensor, *, is_weight: bool, columns: bool) -> Tensor:
    """Returns the largest absolute values of a matrix as it is and as it is transposed, float32 [2]."""
    own = largest_value(matrix)
    rotated = columns and not is_weight
    return torch.stack([own, largest_value(rotate(matrix.t())) if rotated else own])


def quantize_nvfp4(matrix: Tensor, largest: Tensor, *, is_weight: bool, rows: bool, columns: bool) -> QuantizedPair:
    """Returns [m, k] in e2m1, each number in a byte of e4m3, which has these numbers too. `largest` [2] has the largest
    absolute values of the whole tensor, see `largest_of_layouts`. Factors are float32 [m, k / 16]: the products of a
    block's and the tensor's scale."""
    if is_weight:
        squares = in_blocks(in_blocks(matrix, NV_BLOCK).flatten(1).t(), NV_BLOCK).flatten(1).t()
        down = squares.unflatten(0, (-1, NV_BLOCK)).unflatten(2, (-1, NV_BLOCK))  # [m / 16, 16, k / 16, 16]
        factors = _factors(down.abs().amax((1, 3)), largest[0])
        by_row = factors.repeat_interleave(NV_BLOCK, 0)[: matrix.shape[0]]
        by_column = factors.t().repeat_interleave(NV_BLOCK, 0)[: matrix.shape[1]]
        return QuantizedPair(
            _by_factors(matrix, by_row) if rows else None, _by_factors(matrix.t(), by_column) if columns else None
        )
    return QuantizedPair(
        _by_rows(matrix, largest[0]) if rows else None, _by_rows(rotate(matrix.t()), largest[1]) if columns else None
    )


def _by_rows(matrix: Tensor, largest: Tensor) -> Quantized:
    return _by_factors(matrix, _factors(in_blocks(matrix, NV_BLOCK).abs().amax(2), largest))


def _factors(amax: Tensor, largest: Tensor) -> Tensor:
    """Returns the factors of blocks with these largest absolute values, in a tensor with the largest one `largest`."""
    # Quotients of two tensors are rounded once; torch may multiply by the inverse of a number.
    of_tensor = largest / torch.full_like(largest, _LARGEST * _LARGEST_SCALE)
    of_tensor = torch.where(of_tensor == 0, 1.0, of_tensor)
    amax = amax.float()
    scale = cast(amax / torch.full_like(amax, _LARGEST) / of_tensor, torch.float8_e4m3fn)
    return scale.float() * of_tensor


def _by_factors(matrix: Tensor, factors: Tensor) -> Quantized:
    blocks = widened(in_blocks(matrix, NV_BLOCK))
    divisor = torch.where(factors == 0, torch.inf, factors)[..., None]  # a scale that is rounded to 0 gives zeros
    values = round_e2m1(blocks / divisor).flatten(1)[:, : matrix.shape[1]]
    return Quantized(values.to(torch.float8_e4m3fn).contiguous(), factors, NV_BLOCK)
