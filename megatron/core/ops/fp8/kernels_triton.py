"""The operations of fp8 with our kernels for GPUs."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.fp8 import grouped_product_triton, grouped_quantize_triton, quantize_triton, weight_blocks_triton
from megatron.core.ops.fp8.grouped import GroupedKernels, QuantizedGroups, product_of_groups
from megatron.core.ops.fp8.product import accumulate_product_cuda, emulated_product, product_cuda
from megatron.core.ops.fp8.quantize import Quantized
from megatron.core.ops.fp8.recipes import Fp8Kernels
from megatron.core.ops.fp8.weight_blocks import WeightKernels
from megatron.core.ops.moe import grouped_linear_triton
from megatron.core.ops.records import on_gpus


def _scaled_product(left: Quantized, right: Quantized, dtype: torch.dtype, precise: bool = True) -> Tensor:
    return (product_cuda if left.values.is_cuda else emulated_product)(left, right, dtype, precise)


def _product_of_groups(rows: QuantizedGroups, *args: Any, **kwargs: Any) -> Tensor:
    kernel = grouped_product_triton.product_of_groups_triton if rows.values.is_cuda else product_of_groups
    return kernel(rows, *args, **kwargs)


def fp8_kernels_triton() -> Fp8Kernels:
    """Returns the operations of fp8 with our kernels for GPUs."""
    of_groups = grouped_product_triton, grouped_quantize_triton, grouped_linear_triton
    plain = Fp8Kernels(
        product=_scaled_product,
        grouped=on_gpus(GroupedKernels(product=_product_of_groups), *of_groups),
        weights=on_gpus(WeightKernels(), weight_blocks_triton),
    )
    return on_gpus(plain, quantize_triton, accumulate_product=accumulate_product_cuda)
