"""Flags that say the same in other words."""

from typing import Any

import pytest

from megatron.conversion.spellings import bias_places, in_spelling_of, rope_scaling_of, router_weights_sum_to_one
from megatron.training.config.flag_table import flag_table


def values_of(**given: Any) -> dict[str, Any]:
    defaults = {name: flag.default for name, flag in flag_table().items()}
    return defaults | {"num_layers": 2, "num_attention_heads": 4, "num_query_groups": 4} | given


def test_biases_follow_the_switch_for_all() -> None:
    everywhere = bias_places(values_of(add_bias_linear=True, mlp_bias=False))
    assert everywhere == {"attention_output_bias": True, "mlp_bias": False, "add_qkv_bias": True}
    with_experts = bias_places(values_of(add_bias_linear=False, num_moe_experts=2, moe_router_bias=True))
    assert with_experts["moe_router_bias"] and not with_experts["moe_expert_mlp_bias"]


def test_router_weights_that_sum_to_one() -> None:
    assert router_weights_sum_to_one(values_of())
    assert not router_weights_sum_to_one(values_of(moe_router_pre_softmax=True))
    assert router_weights_sum_to_one(values_of(moe_router_pre_softmax=True, moe_router_norm_topk_prob=True))


@pytest.mark.parametrize(
    ("given", "scaling"),
    [
        ({}, None),
        ({"use_rope_scaling": True}, ("llama3", 8.0)),
        ({"rope_scaling_type": "llama3"}, ("llama3", 8.0)),
        ({"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0}, ("yarn", 4.0)),
        ({"rotary_seq_len_interpolation_factor": 3}, ("linear", 3.0)),
    ],
)
def test_rope_scaling(given: dict[str, Any], scaling: tuple[str, float] | None) -> None:
    assert rope_scaling_of(values_of(**given)) == scaling


@pytest.mark.parametrize(
    ("of_run", "read_back"),
    [
        ({"use_rope_scaling": True}, {"rope_scaling_type": "llama3"}),
        (
            {"rotary_seq_len_interpolation_factor": 3},
            {"rope_scaling_type": "linear", "rope_scaling_factor": 3.0},
        ),
        ({"window_size": (3, 0), "window_attn_skip_freq": 2}, {"window_size": (3, 0), "window_attn_skip_freq": [1, 0]}),
        ({"moe_layer_freq": 2, "num_moe_experts": 4}, {"moe_layer_freq": [1, 0], "num_moe_experts": 4}),
        ({"moe_router_pre_softmax": True, "moe_router_norm_topk_prob": True}, {"moe_router_pre_softmax": False}),
        ({"group_query_attention": True}, {}),
    ],
)
def test_equal_meaning_takes_the_spelling_of_the_run(of_run: dict[str, Any], read_back: dict[str, Any]) -> None:
    sizes = {"num_layers": 2, "num_attention_heads": 4}
    values = values_of(**of_run)
    spelled = in_spelling_of(values, sizes | read_back)
    assert {name: spelled.get(name, flag_table()[name].default) for name in {*of_run, *read_back}} == {
        name: values[name] for name in {*of_run, *read_back}
    }


@pytest.mark.parametrize(
    ("of_run", "read_back"),
    [
        ({"rope_scaling_type": "yarn"}, {"rope_scaling_type": "linear"}),
        ({"window_size": (3, 0), "window_attn_skip_freq": 2}, {"window_size": (3, 0)}),
        ({"moe_router_pre_softmax": True}, {"moe_router_pre_softmax": False}),
        ({"group_query_attention": True, "num_query_groups": 2}, {}),
        ({"mlp_bias": True, "add_bias_linear": False}, {"add_bias_linear": False}),
    ],
)
def test_another_meaning_is_left_alone(of_run: dict[str, Any], read_back: dict[str, Any]) -> None:
    sizes = {"num_layers": 2, "num_attention_heads": 4}
    spelled = in_spelling_of(values_of(**of_run), sizes | read_back)
    assert {name: spelled.get(name) for name in read_back} == read_back
    assert not any(name in spelled for name in of_run.keys() - read_back.keys())
