"""Nemotron-H: published settings, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.oracles import make_model, save_model
from conversion.test_against_transformers import quiet
from safetensors.torch import load_file, save_file

from megatron.conversion.exporting import export_model
from megatron.conversion.families import family_of
from megatron.conversion.importing import import_model
from megatron.training.config.flag_table import flag_table
from pretrain_gpt import build_model

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


@pytest.mark.parametrize("has_copy", [True, False])
def test_a_tied_model_is_exported_with_both_weights(has_copy: bool, tmp_path: Path) -> None:
    """transformers ignores `tie_word_embeddings`: without the weight of the output layer it would draw one."""
    oracle = make_model("nemotron h, tied", torch.float32)
    oracle.lm_head.weight.data.copy_(oracle.get_input_embeddings().weight)
    theirs = save_model(oracle, tmp_path / "theirs")
    tensors = load_file(theirs / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if has_copy or name != "lm_head.weight"}
    save_file(kept, theirs / "model.safetensors")
    done = import_model(theirs, tmp_path / "ours", build_model, log=quiet)
    assert "--untie-embeddings-and-output-weights" not in done.flags
    export_model(tmp_path / "ours", tmp_path / "back", build_model, verify=True, log=quiet)
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "back/config.json").read_text())["tie_word_embeddings"]
