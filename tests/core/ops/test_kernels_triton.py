"""Triton kernels agree with their references, in Triton's interpreter: the checks of each kernel's file."""

from types import ModuleType

import pytest
from support import (
    elementwise_kernels,
    expert_kernels,
    fp8_grouped_kernels,
    muon_kernels,
    recurrent_kernels,
    selected_keys,
    shared_kernels,
    triton_agreement,
)

CHECKS: dict[str, tuple[ModuleType, list[str]]] = {
    "ops/attention/indexer_triton.py": (selected_keys, ["scores"]),
    "ops/attention/masked_triton.py": (selected_keys, ["masks"]),
    "ops/attention/output_gate_triton.py": (elementwise_kernels, ["gated_outputs", "heads_of_a_projection"]),
    "ops/attention/merge_triton.py": (triton_agreement, ["merged_blocks"]),
    "ops/dropout/dropout_triton.py": (triton_agreement, ["masks", "bias_dropout_residual"]),
    "ops/fp8/grouped_quantize_triton.py": (fp8_grouped_kernels, ["largest_values", "casts", "by_largest", "blocks"]),
    "ops/moe/permute_triton.py": (expert_kernels, ["moves", "places"]),
    "ops/moe/routing_triton.py": (
        expert_kernels,
        ["choices", "weights_of_choices", "counted_choices", "routers", "parts_of_numbers"],
    ),
    "ops/moe/shared_triton.py": (shared_kernels, ["shared_outputs", "shared_inputs"]),
    "ops/moe/weighted_activation_triton.py": (expert_kernels, ["activations", "nan_inputs", "recomputed_activation"]),
    "ops/cross_entropy_triton.py": (triton_agreement, ["losses"]),
    "ops/embedding_triton.py": (elementwise_kernels, ["table_rows"]),
    "ops/gated_norm_triton.py": (recurrent_kernels, ["gated_norms"]),
    "ops/norm_triton.py": (elementwise_kernels, ["norms", "norms_of_views", "norms_with_residual"]),
    "ops/normed_rope_triton.py": (elementwise_kernels, ["normed_positions"]),
    "ops/symmetric_product_triton.py": (muon_kernels, ["symmetric_products"]),
    "ops/sum_rows_triton.py": (elementwise_kernels, ["sums", "biases"]),
    "optimizer/adam_triton.py": (elementwise_kernels, ["updates", "stored_updates"]),
    "optimizer/muon_triton.py": (
        muon_kernels,
        ["orthogonal_matrices", "matrices_of_several_shapes", "products_in_two_parts", "updates", "updates_of_runs"],
    ),
}


@pytest.mark.parametrize(("file", "check"), [(file, check) for file, (_, checks) in CHECKS.items() for check in checks])
def test_the_kernel_agrees_with_its_reference(file: str, check: str) -> None:
    getattr(CHECKS[file][0], check)()
