"""Rules: keys of config.json to fields and back."""

from typing import Any

import pytest

from megatron.conversion.config_rules import Copied, Fixed, Inverse, Rule, Switch, Unused, Written
from megatron.conversion.layer_rules import (
    ATTENTION_BIASES,
    GATED_ACTIVATIONS,
    AttentionHeads,
    Biases,
    ExpertLayers,
    RouterWeights,
    ScoreScale,
    SlidingWindows,
    SwitchedWindows,
    Words,
)
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table

WINDOWS = {"num_hidden_layers": 3, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}

CASES: list[tuple[Rule, dict[str, Any], dict[str, Any]]] = [
    (Fixed("hidden_act", "silu"), {}, {}),
    (Unused(("torch_dtype",)), {"torch_dtype": "float16"}, {}),
    (Inverse("logits_scaling", "logit_scale"), {"logits_scaling": 4.0}, {"logit_scale": 0.25}),
    (Written({"is_decoder": True}), {}, {}),
    (
        AttentionHeads(),
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
        {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 24},
    ),
    (
        AttentionHeads(),
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": None, "head_dim": None},
        {"num_attention_heads": 4, "kv_channels": 16},
    ),
    (
        ATTENTION_BIASES,
        {"attention_bias": True},
        {"add_bias_linear": False, "add_qkv_bias": True, "attention_output_bias": True},
    ),
    (ATTENTION_BIASES, {"attention_bias": False}, {"add_bias_linear": False}),
    (Biases("use_bias"), {"use_bias": True}, {"add_bias_linear": True}),
    (Words("hidden_act", GATED_ACTIVATIONS), {"hidden_act": "gelu"}, {"exact_geglu": True}),
    (SlidingWindows(), {"sliding_window": None, "num_hidden_layers": 3}, {}),
    (
        SlidingWindows(),
        {"sliding_window": 8, "num_hidden_layers": 3},
        {"window_size": (7, 0), "window_attn_skip_freq": None},
    ),
    (SlidingWindows(by_layer=True), WINDOWS | {"use_sliding_window": False}, {}),
    (SlidingWindows(by_layer=True), WINDOWS | {"sliding_window": None}, {}),
    (SlidingWindows(by_layer=True), WINDOWS, {"window_size": (7, 0), "window_attn_skip_freq": [0, 1, 1]}),
    (
        SlidingWindows(by_layer=True),
        WINDOWS | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        {"window_size": (7, 0), "window_attn_skip_freq": [1, 0, 0]},
    ),
    (ScoreScale("attention_multiplier"), {"attention_multiplier": 0.25}, {"softmax_scale": 0.25}),
    (ScoreScale("query_pre_attn_scalar", query_scalar=True), {"query_pre_attn_scalar": 64}, {"softmax_scale": 0.125}),
    (SwitchedWindows(), {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 48}, {}),
    (Switch("bias", {"add_qkv_bias": True}), {"bias": True}, {"add_qkv_bias": True}),
    (SwitchedWindows(), WINDOWS, {"window_size": (7, 0), "window_attn_skip_freq": None}),
    (
        SlidingWindows(by_layer=True, alternate=True),
        WINDOWS | {"max_window_layers": 2},
        {"window_size": (7, 0), "window_attn_skip_freq": [1, 0, 0]},
    ),
    (
        RouterWeights(),
        {"num_experts_per_tok": 2, "norm_topk_prob": True},
        {"moe_router_topk": 2, "moe_router_score_function": "softmax", "moe_router_pre_softmax": False},
    ),
    (
        RouterWeights(),
        {"num_experts_per_tok": 2, "norm_topk_prob": False},
        {"moe_router_topk": 2, "moe_router_score_function": "softmax", "moe_router_pre_softmax": True},
    ),
    (
        RouterWeights(key=None),
        {"num_experts_per_tok": 1},
        {
            "moe_router_topk": 1,
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": True,
            "moe_router_norm_topk_prob": True,
        },
    ),
    (
        ExpertLayers(),
        {"num_hidden_layers": 3, "decoder_sparse_step": 1, "mlp_only_layers": None},
        {"moe_layer_freq": 1},
    ),
    (
        ExpertLayers(),
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        {"moe_layer_freq": [0, 1, 0, 0, 0]},
    ),
]


@pytest.mark.parametrize(("rule", "config", "fields"), CASES)
def test_fields_and_back(rule: Rule, config: dict[str, Any], fields: dict[str, Any]) -> None:
    """The keys that a rule writes for the fields that it read give these fields again."""
    assert rule.fields(config) == fields
    derived = {"num_layers": config.get("num_hidden_layers", 1), "num_moe_experts": 4}
    derived["num_query_groups"] = fields.get("num_attention_heads")
    values = {name: flag.default for name, flag in flag_table().items()} | derived | fields
    assert rule.fields(config | rule.keys(values)) == fields


@pytest.mark.parametrize(
    ("rule", "config", "said"),
    [
        (
            Inverse("logits_scaling", "logit_scale"),
            {"logits_scaling": 0},
            "logits_scaling is 0; it must be larger than 0",
        ),
        (AttentionHeads(), {"num_attention_heads": 0}, "num_attention_heads is 0; it must be at least 1"),
        (SlidingWindows(), {"sliding_window": 0, "num_hidden_layers": 3}, "sliding_window is 0; it must be at least 1"),
        (
            SlidingWindows(by_layer=True),
            WINDOWS | {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
            "layer_types has 'sliding_attention', but use_sliding_window or sliding_window is off",
        ),
        (
            ExpertLayers(),
            {"decoder_sparse_step": 0, "mlp_only_layers": []},
            "decoder_sparse_step is 0; it must be at least 1",
        ),
    ],
)
def test_what_is_unsupported_is_named_by_its_key(rule: Rule, config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        rule.fields(config)
    assert str(refusal.value) == said


def test_a_key_with_two_names_is_written_under_both_and_may_say_that_a_field_is_not_set() -> None:
    rule = Copied("num_local_experts", "num_moe_experts", also="num_experts", unset=0)
    assert rule.keys({"num_moe_experts": None}) == {"num_local_experts": 0, "num_experts": 0}
    assert rule.keys({"num_moe_experts": 4}) == {"num_local_experts": 4, "num_experts": 4}


def test_keys_without_a_field_are_written_as_the_rule_says() -> None:
    assert Written({"is_decoder": True}).keys({}) == {"is_decoder": True}
    assert Fixed("hidden_act", "silu", write=False).keys({}) == {} == Unused(("torch_dtype",)).keys({})


def test_a_window_of_another_form_is_left_out() -> None:
    values = {"num_layers": 2, "window_size": (3, 1)}
    assert SlidingWindows(by_layer=True).keys(values) == {"sliding_window": None, "use_sliding_window": False}
