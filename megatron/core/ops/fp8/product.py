"""Products of quantised matrices."""

import torch
from torch import Tensor

from megatron.core.ops.fp8 import cublaslt
from megatron.core.ops.fp8.formats import BLOCK
from megatron.core.ops.fp8.quantize import Quantized, dequantize
from megatron.core.utils.torch_private import scaled_mm
from megatron.core.utils.warn import warn_on_first_rank

_MULTIPLE = 16
"""cuBLAS's fp8 products need dimensions that divide by it."""


def emulated_product(left: Quantized, right: Quantized, dtype: torch.dtype, precise: bool = True) -> Tensor:
    """Returns left right^T, [m, k] x [n, k] -> [m, n], of the dequantised values: accumulated in float32 at least and
    rounded to `dtype`. `precise` has no effect."""
    return (dequantize(left, dtype) @ dequantize(right, dtype).t()).to(dtype)


def accumulate_product(total: Tensor, left: Quantized, right: Quantized) -> None:
    """Adds `emulated_product` to `total` [m, n], computed and added in its type."""
    total.add_(emulated_product(left, right, total.dtype))


def accumulate_product_cuda(total: Tensor, left: Quantized, right: Quantized) -> None:
    """Does `accumulate_product` on the fp8 units of a GPU, in one kernel if each matrix has one factor."""
    if not (
        total.dtype is torch.float32
        and total.is_contiguous()
        and left.factors.dim() == right.factors.dim() == 0
        and _is_native(left, right, total.dtype)
        and total.shape[0] % _MULTIPLE == 0
    ):
        total.add_(product_cuda(left, right, total.dtype))
        return
    operands = left.values, right.values, left.factors, right.factors
    if not (cublaslt.is_available() and cublaslt.accumulate_product(total, *operands)):
        warn_on_first_rank("fp8: cuBLASLt adds no fp8 product to a float32 gradient here, so a separate kernel does")
        total.add_(product_cuda(left, right, total.dtype))


def product_cuda(left: Quantized, right: Quantized, dtype: torch.dtype, precise: bool = True) -> Tensor:
    """Does `emulated_product` on the fp8 units of a GPU. Without `precise` they may keep fewer bits of partial sums,
    which is faster; those of blocks keep them always.

    Shapes that cuBLAS has no fp8 product for, a `dtype` of float64, and GPUs without fp8 units are emulated; a warning
    says so once.
    """
    if not _is_native(left, right, dtype):
        if dtype is not torch.float64 and left.values.numel():
            warn_on_first_rank(
                "fp8: a product is computed in plain torch, which is slow: fp8 units need tokens and widths that "
                f"divide by {_MULTIPLE} (recipe blockwise: by {4 * BLOCK}), and a GPU that has such units"
            )
        return emulated_product(left, right, dtype)
    return scaled_mm(
        left.values,
        right.values.t(),
        left.factors,
        right.factors.t(),
        out_dtype=dtype,
        use_fast_accum=not (precise or _has_blocks(left) or _has_blocks(right)),
    )


def _is_native(left: Quantized, right: Quantized, dtype: torch.dtype) -> bool:
    if torch.cuda.get_device_capability(left.values.device) < (8, 9) or dtype is torch.float64:
        return False
    (m, k), n = left.values.shape, right.values.shape[0]
    if m == 0 or k == 0 or k % _MULTIPLE or n % _MULTIPLE:
        return False
    if not _has_blocks(left) and not _has_blocks(right):
        return True
    # The factors of blocks lie in memory in vectors of 16 bytes.
    squares = left if left.factors.shape[0] != m else right if right.factors.shape[0] != n else None
    return k % BLOCK == 0 and m % 4 == 0 and n % 4 == 0 and (squares is None or k % (4 * BLOCK) == 0)


def _has_blocks(matrix: Quantized) -> bool:
    return matrix.factors.dim() == 2 and (
        matrix.factors.shape[1] > 1 or matrix.factors.shape[0] != matrix.values.shape[0]
    )
