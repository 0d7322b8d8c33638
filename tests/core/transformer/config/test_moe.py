"""Impossible values of experts are named, with what would work."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.moe import validate
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size 2 spreads experts over ranks: it needs"),
        ({"num_moe_experts": 6, "expert_model_parallel_size": 4}, "does not divide num_moe_experts 6; use 3 or 6"),
        (
            {"num_moe_experts": 4, "moe_ffn_hidden_size": 6, "expert_tensor_parallel_size": 4},
            "expert_tensor_parallel_size 4 does not divide moe_ffn_hidden_size 6; use 3 or 6",
        ),
        ({"num_moe_experts": 4, "moe_layer_freq": [1]}, "moe_layer_freq has 1 entries for num_layers 2"),
        ({"num_moe_experts": 4, "moe_apply_probs_on_input": True}, "it needs moe_router_topk 1"),
        (
            {"num_moe_experts": 4, "moe_balanced_expert_placement": True},
            "moe_balanced_expert_placement swaps experts of stacked weights: it needs moe_grouped_gemm",
        ),
        (
            {"num_moe_experts": 4, "moe_balanced_expert_placement": True, "moe_grouped_gemm": True, "fp8": "hybrid"},
            "moe_balanced_expert_placement does not go with fp8",
        ),
        (
            {
                "num_moe_experts": 4,
                "moe_balanced_expert_placement": True,
                "moe_grouped_gemm": True,
                "cuda_graph_impl": "local",
            },
            "moe_balanced_expert_placement does not go with cuda_graph_impl local",
        ),
        (
            {
                "num_moe_experts": 4,
                "moe_balanced_expert_placement": True,
                "moe_grouped_gemm": True,
                "enable_cuda_graph": True,
            },
            "moe_balanced_expert_placement does not go with enable_cuda_graph",
        ),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TransformerConfig(**SMALL | fields)
    assert message in str(caught.value)


def test_defaults_have_no_problem() -> None:
    assert not list(validate(TransformerConfig(**SMALL)))
