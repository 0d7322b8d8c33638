"""Qwen3-Next: published settings, and what is refused."""

from typing import Any

from megatron.conversion.families import family_of
from megatron.training.config.flag_table import flag_table

QWEN3_NEXT = family_of("Qwen3NextForCausalLM")
PUBLISHED: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "intermediate_size": 5120,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "use_sliding_window": False,
}
"""The keys of Qwen3-Next-80B-A3B's config.json that are no defaults of transformers."""


def test_a_config_of_the_hub() -> None:
    fields = QWEN3_NEXT.fields_of(PUBLISHED)
    assert fields["linear_attention_freq"] == [1, 1, 1, 0] * 12
    assert (fields["rotary_percent"], fields["rotary_base"]) == (0.25, 10000000)
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_layer_freq"]) == (512, 10, 1)
    assert fields["moe_shared_expert_gate"] and fields["attention_output_gate"]
    values = {name: flag.default for name, flag in flag_table().items()} | fields
    assert QWEN3_NEXT.fields_of(QWEN3_NEXT.config_of(values)) == fields


def test_layer_types_come_before_the_interval() -> None:
    kinds = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
    assert QWEN3_NEXT.fields_of(kinds)["linear_attention_freq"] == [0, 1]


def test_layers_of_multi_token_prediction_are_left_out() -> None:
    assert QWEN3_NEXT.is_constant("mtp.layers.0.self_attn.q_proj.weight")
    assert not QWEN3_NEXT.is_constant("model.layers.0.self_attn.q_proj.weight")
