"""Nemotron-H: published settings, and what is refused."""

from typing import Any

from megatron.conversion.families import family_of
from megatron.training.config.flag_table import flag_table

NEMOTRON_H = family_of("NemotronHForCausalLM")
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_H_8B: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hybrid_override_pattern": PATTERN,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 52,
    "num_logits_to_keep": 1,
    "rms_norm_eps": 1e-5,
    "time_step_limit": [0.0, float("inf")],
    "time_step_rank": 256,
}
"""Keys of Nemotron-H-8B's config.json that are no defaults of transformers."""


def all_values(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: flag.default for name, flag in flag_table().items()} | fields


def test_a_config_of_the_hub() -> None:
    fields = NEMOTRON_H.fields_of(NEMOTRON_H_8B)
    assert (fields["hybrid_layer_pattern"], fields["num_layers"]) == (PATTERN, 52)
    assert fields["squared_relu"] and fields["mamba_min_time_step"] == 0.001
    assert not [name for name in fields if "moe" in name], "transformers does not look at the keys of experts"
    assert NEMOTRON_H.fields_of(NEMOTRON_H.config_of(all_values(fields))) == fields
    assert not any("router" in name or "linear_qkv.bias" in name for name in NEMOTRON_H.tensors_of(all_values(fields)))


def test_experts_and_their_latents() -> None:
    kinds = {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "moe_latent_size": 16}
    fields = NEMOTRON_H.fields_of(kinds)
    assert (fields["hybrid_layer_pattern"], fields["num_moe_experts"], fields["moe_latent_size"]) == ("ME*-", 8, 16)
    assert NEMOTRON_H.fields_of({})["hybrid_layer_pattern"] == "ME*-", "what transformers builds without the key"
    assert NEMOTRON_H.fields_of(NEMOTRON_H.config_of(all_values(fields))) == fields
    assert any("fc1_latent_proj" in name for name in NEMOTRON_H.tensors_of(all_values(fields)))


def test_a_model_that_is_no_hybrid_has_no_table() -> None:
    assert NEMOTRON_H.tensors_of(all_values({})) == {}


def test_the_names_of_transformers_5_are_those_of_the_hub() -> None:
    assert NEMOTRON_H.current_name("model.layers.0.norm.weight") == "backbone.layers.0.norm.weight"
