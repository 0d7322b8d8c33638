"""The operations of fp8 with our kernels for GPUs."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.fp8.grouped import GroupedKernels, QuantizedGroups, product_of_groups
from megatron.core.ops.fp8.grouped_product_triton import accumulate_product_of_groups_triton, product_of_groups_triton
from megatron.core.ops.fp8.grouped_quantize_triton import (
    cast_segments_triton,
    largest_of_segment_lines_triton,
    largest_of_segments_triton,
    quantize_segment_blocks_triton,
    quantize_segments_by_largest_triton,
)
from megatron.core.ops.fp8.product import accumulate_product_cuda, emulated_product, product_cuda
from megatron.core.ops.fp8.quantize import Quantized
from megatron.core.ops.fp8.quantize_triton import (
    cast_scaled_triton,
    largest_of_lines_triton,
    largest_value_triton,
    quantize_blocks_triton,
    quantize_by_largest_triton,
)
from megatron.core.ops.fp8.recipes import Fp8Kernels
from megatron.core.ops.fp8.weight_blocks import WeightKernels
from megatron.core.ops.fp8.weight_blocks_triton import (
    cast_blocks_triton,
    largest_of_blocks_triton,
    transposed_codes_triton,
)
from megatron.core.ops.moe.grouped_linear_triton import accumulate_grouped_product_triton
from megatron.core.ops.records import on_gpus


def _scaled_product(left: Quantized, right: Quantized, dtype: torch.dtype, precise: bool = True) -> Tensor:
    return (product_cuda if left.values.is_cuda else emulated_product)(left, right, dtype, precise)


def _product_of_groups(rows: QuantizedGroups, *args: Any, **kwargs: Any) -> Tensor:
    return (product_of_groups_triton if rows.values.is_cuda else product_of_groups)(rows, *args, **kwargs)


def fp8_kernels_triton() -> Fp8Kernels:
    """Returns the operations of fp8 with our kernels for GPUs."""
    grouped = on_gpus(
        GroupedKernels(product=_product_of_groups),
        accumulate_rows=accumulate_grouped_product_triton,
        largest=largest_of_segments_triton,
        largest_of_lines=largest_of_segment_lines_triton,
        cast=cast_segments_triton,
        quantize_blocks=quantize_segment_blocks_triton,
        quantize_by_largest=quantize_segments_by_largest_triton,
        accumulate=accumulate_product_of_groups_triton,
    )
    weights = on_gpus(
        WeightKernels(),
        largest_of_blocks=largest_of_blocks_triton,
        cast_blocks=cast_blocks_triton,
        transposed_codes=transposed_codes_triton,
    )
    return on_gpus(
        Fp8Kernels(product=_scaled_product, grouped=grouped, weights=weights),
        largest_value=largest_value_triton,
        largest_of_lines=largest_of_lines_triton,
        cast_scaled=cast_scaled_triton,
        quantize_blocks=quantize_blocks_triton,
        quantize_by_largest=quantize_by_largest_triton,
        accumulate_product=accumulate_product_cuda,
    )
