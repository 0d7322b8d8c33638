"""Falcon: the layers of its generations, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.oracles import make_model_of, save_model, sizes_of

from megatron.conversion.families import family_of
from megatron.conversion.importing import import_model
from megatron.conversion.tensor_mapping import hub_tensors
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table
from pretrain_gpt import build_model

FALCON = family_of("FalconForCausalLM")


@pytest.mark.parametrize(
    ("given", "placement", "groups"),
    [
        ({}, "parallel", 1),
        ({"multi_query": False}, "parallel", 71),
        ({"multi_query": False, "parallel_attn": False}, "pre", 71),
        ({"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 32}, "parallel_two_norms", 8),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_kv_heads": 1}, "parallel", 1),
    ],
)
def test_layers_of_falcon(given: dict[str, Any], placement: str, groups: int) -> None:
    fields = FALCON.fields_of(sizes_of(FALCON) | given)
    heads = given.get("num_attention_heads", 71)
    assert (fields["norm_placement"], fields.get("num_query_groups", heads)) == (placement, groups)
    values = {name: flag.default for name, flag in flag_table().items()} | {"num_query_groups": groups} | fields
    assert FALCON.fields_of(FALCON.config_of(values)) == fields


def test_alibi_of_many_heads_is_verified_by_what_transformers_rounds(tmp_path: Path) -> None:
    """Slopes that are no powers of 2 are rounded there and exact here. Wrong slopes differ by more."""
    sizes = {"vocab_size": 99, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 16}
    oracle = make_model_of("Falcon", sizes | {"alibi": True, "attn_implementation": "sdpa"}, torch.float32, 1)
    said: list[str] = []
    theirs = save_model(oracle, tmp_path / "theirs")
    done = import_model(theirs, tmp_path / "ours", build_model, verify=True, log=said.append)
    assert done.comparison is not None and 1e-3 < done.comparison.difference < 0.05
    assert any("transformers rounds slopes to bfloat16" in line for line in said)
    comparison = dataclasses.replace(done.comparison, difference=0.11)
    with pytest.raises(UserError, match=r"0.11 standard deviations of the logits, 0.1 is allowed"):
        comparison.check("theirs")


def test_the_norms_of_falcon_have_other_names_where_there_are_two() -> None:
    shapes = {f"decoder.layers.3.{name}.weight": (8,) for name in ("input_layernorm", "pre_mlp_layernorm")}
    for placement, names in (("pre", ["input_layernorm", "post_attention_layernorm"]), ("parallel_two_norms", None)):
        found = hub_tensors(FALCON.tensors_of({"norm_placement": placement}), shapes)
        wanted = names or ["ln_attn", "ln_mlp"]
        assert [tensor.name for tensor in found] == [f"transformer.h.3.{name}.weight" for name in wanted]
