"""Impossible values of recomputation are named, with what would work."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.memory import validate
from megatron.core.transformer.transformer_config import TransformerConfig

FINE: dict[str, Any] = {"fine_grained_activation_offloading": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recompute_granularity": "full"}, "recompute_granularity full needs recompute_method uniform or block"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            "recompute_modules moe: moe is a part of a layer of",
        ),
        (
            {"fp8": "hybrid", "recompute_granularity": "selective", "recompute_modules": ["mlp_act"]},
            "mlp_act saves nothing with fp8 hybrid: the second product keeps its input in fp8 anyway",
        ),
        (FINE, "fine_grained_activation_offloading needs offload_modules, any of attn_norm, qkv_linear"),
        (FINE | {"offload_modules": ["mlp"]}, "offload_modules mlp: mlp is no such part of a layer"),
        (
            FINE | {"offload_modules": ["moe_act"]},
            "moe_act is a part of a layer of experts, and num_moe_experts is not",
        ),
        (
            FINE | {"offload_modules": ["mlp_norm"], "norm_placement": "post"},
            "mlp_norm is the norm before a branch, and norm_placement post has none",
        ),
        (
            FINE | {"offload_modules": ["core_attn"], "cpu_offloading_num_layers": 1},
            "fine_grained_activation_offloading and cpu_offloading_num_layers 1: choose one",
        ),
        (FINE | FULL | {"offload_modules": ["core_attn"]}, "full recomputation keeps the layers' inputs only"),
        (
            {"cpu_offloading_num_layers": 1, "cuda_graph_impl": "local"},
            "cpu_offloading_num_layers 1: a captured micro-batch keeps its activations on the device",
        ),
        ({"cpu_offloading_num_layers": -1}, "cpu_offloading_num_layers -1 must be at least 0"),
        ({"activation_offload_fraction": 1.5}, "activation_offload_fraction 1.5 must be from 0 to 1"),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TransformerConfig(**SMALL | fields)
    assert message in str(caught.value)


@pytest.mark.parametrize("keeps_wide", [{"fp8_wgrad": False}, {"first_last_layers_bf16": True}])
def test_an_activation_that_fp8_layers_keep_wide_can_be_recomputed(keeps_wide: dict[str, Any]) -> None:
    way = {"fp8": "hybrid", "recompute_granularity": "selective", "recompute_modules": ["mlp_act"]}
    assert TransformerConfig(**SMALL | way | keeps_wide).recompute_modules == ["mlp_act"]


def test_defaults_have_no_problem() -> None:
    assert not list(validate(TransformerConfig(**SMALL)))
