"""Llama and its relatives: tables that other families share, and Granite's factors."""

import pytest

from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table
from megatron.training.conversion.families import family_of
from megatron.training.conversion.llama import OURS, gated, one_to_one
from megatron.training.conversion.tensor_mapping import hub_tensors

GRANITE = family_of("GraniteForCausalLM")


def test_tables() -> None:
    mapping = one_to_one({"a": "b"}) | gated(f"{OURS}.mlp", "{layer}", "gate", "up", "down")
    shapes = {
        "a": (3,),
        "decoder.layers.2.mlp.linear_fc1.weight": (2, 4, 3),
        "decoder.layers.2.mlp.linear_fc2.bias": (3,),
    }
    names = [tensor.name for tensor in hub_tensors(mapping, shapes)]
    assert names == ["b", "2.gate.weight", "2.up.weight", "2.down.bias"]


def test_factors_of_granite() -> None:
    published = {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
    fields = GRANITE.fields_of(published | {"residual_multiplier": 0.22})
    assert (fields["softmax_scale"], fields["logit_scale"], fields["residual_multiplier"]) == (0.015625, 0.125, 0.22)
    keys = GRANITE.config_of({name: flag.default for name, flag in flag_table().items()} | fields)
    assert published.items() <= keys.items()
    with pytest.raises(UserError, match="logits_scaling is 0; it must be larger than 0"):
        GRANITE.fields_of({"logits_scaling": 0})
