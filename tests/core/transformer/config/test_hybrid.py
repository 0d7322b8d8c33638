"""Hybrid models: impossible patterns and sizes are named, and what a pattern decides is derived."""

import dataclasses
import math
from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.transformer.config.hybrid import mamba_heads, validate
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "mamba_head_dim": 8, "mamba_num_groups": 4}


def hybrid(pattern: str | None, **fields: Any) -> TransformerConfig:
    return TransformerConfig(**SMALL | {"hybrid_layer_pattern": pattern} | fields)


@pytest.mark.parametrize(
    ("pattern", "fields", "message"),
    [
        ("M*-", {"num_layers": 4}, "hybrid_layer_pattern M*- has 3 layers, num_layers 4; give one letter for each"),
        (
            "M*x",
            {},
            "'x' is no layer; the letters are M (mamba), * (attention), - (mlp), E (moe), G (gated_delta_net), D",
        ),
        ("M*/x", {}, "'x' is no layer; the letters are M"),
        ("M*/M/-", {}, "not yet: M/- as depths of multi-token prediction; all must be equal: one letter, or one of"),
        ("M*/-M", {}, "not yet: -M as depths of multi-token prediction"),
        ("M*/", {"mtp_num_layers": 1}, "not yet:  as depths of multi-token prediction"),
        ("M*/*-", {"mtp_num_layers": 2}, "has 1 depths of multi-token prediction, mtp_num_layers 2; give letters"),
        ("M*/E", {}, "has layers of experts (E); num_moe_experts says how many"),
        ("MD", {}, "dsa needs multi_latent_attention, whose keys its indexer selects"),
        ("MG", {"linear_num_value_heads": 8}, "linear_num_value_heads 8 is no multiple of linear_num_key_heads 16"),
        ("ME", {}, "has layers of experts (E); num_moe_experts says how many"),
        ("M*", {"num_moe_experts": 4}, "hybrid_layer_pattern M* has no layer of experts (E)"),
        ("ME", {"num_moe_experts": 4, "moe_layer_freq": 2}, "moe_layer_freq 2 does not go with hybrid_layer_pattern"),
        ("M*", {"norm_placement": "parallel"}, "layers of a hybrid_layer_pattern have one branch each; pre works"),
        (
            "MM|*-",
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tttL"},
            "pipeline_model_parallel_layout Et|tttL does not go with a | in hybrid_layer_pattern MM|*-",
        ),
        (
            "M*",
            {"mtp_num_layers": 1},
            "has 0 depths of multi-token prediction, mtp_num_layers 1; give letters after a /",
        ),
        ("M*", {"use_mup": True, "mup_base_hidden_size": 32}, "use_mup: not yet with hybrid_layer_pattern"),
        ("M", {"mamba_head_dim": 48}, "mamba_head_dim 48 does not divide the 128 channels of a Mamba-2 layer"),
        ("M", {"mamba_num_groups": 5}, "mamba_num_groups 5 does not divide the 16 heads of a Mamba-2 layer; use 4"),
        ("M", {"mamba_num_groups": 0}, "mamba_num_groups 0 must be at least 1"),
        (
            "M",
            {"tensor_model_parallel_size": 4, "mamba_num_groups": 2},
            "tensor_model_parallel_size 4 does not divide mamba_num_groups 2, the groups of heads of a Mamba-2 layer; "
            "use 2",
        ),
        (
            "M",
            {"tensor_model_parallel_size": 2, "context_parallel_size": 4},
            "context_parallel_size 4 does not divide the 2 groups of a Mamba-2 layer (mamba_num_groups) on a tensor "
            "parallel rank; use 2",
        ),
    ],
)
def test_impossible_values_are_named(pattern: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        hybrid(pattern, **fields)
    assert message in str(caught.value)


def test_what_a_pattern_decides() -> None:
    config = hybrid("MM|*-", pipeline_model_parallel_size=2)
    assert config.is_hybrid_model and config.num_layers == 4 and mamba_heads(config) == 16
    assert [stage.layers for stage in stage_map(config).stages] == [range(1, 3), range(3, 5)]
    assert dataclasses.replace(config).pipeline_model_parallel_layout == config.pipeline_model_parallel_layout
    # A layer is added to the residual stream once.
    assert config.output_layer_init_method.std == pytest.approx(config.init_method_std / math.sqrt(4))
    assert hybrid(None, is_hybrid_model=True, num_layers=3).hybrid_layer_pattern == "MMM"
    plain = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    assert not plain.is_hybrid_model and not list(validate(plain))
