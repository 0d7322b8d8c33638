"""A family reads a config.json by its rules, and names every key that it cannot take."""

import dataclasses

import pytest

from megatron.conversion.config_rules import Copied, Fixed
from megatron.conversion.family import Family
from megatron.core.exceptions import UserError

FAMILY = Family(
    "MineForCausalLM",
    "mine",
    {"decoder.layers.{layer}.mlp.router.weight": ()},
    (Copied("width", "hidden_size"), Copied("depth", "num_layers"), Fixed("act", "silu")),
    defaults={"depth": 2, "act": "silu"},
    old_names=((r"\.gamma$", ".weight"), (r"\.beta$", ".bias")),
)


def test_keys_become_fields_and_fields_become_keys() -> None:
    assert FAMILY.fields_of({"width": 8}) == {"hidden_size": 8, "num_layers": 2}  # an absent key has its default
    keys = FAMILY.config_of({"hidden_size": 8, "num_layers": 3})
    assert keys == {"architectures": ["MineForCausalLM"], "model_type": "mine", "width": 8, "depth": 3, "act": "silu"}
    assert FAMILY.fields_of(keys) == {"hidden_size": 8, "num_layers": 3}


def test_every_problem_is_told_with_the_file_and_the_key() -> None:
    with pytest.raises(UserError) as refusal:
        FAMILY.fields_of({"width": 8, "act": "relu", "strange": 1, "empty": None}, file="a/config.json")
    assert str(refusal.value).splitlines() == [
        "a/config.json: strange is not known for MineForCausalLM",
        "a/config.json: act is 'relu'; only 'silu' is supported",
    ]
    assert FAMILY.fields_of({"width": 8, "strange": 1}, ignored=["strange"])["hidden_size"] == 8
    with pytest.raises(
        UserError, match="which has model_type 'mine', but model_type is 'other'; correct the wrong one"
    ):
        FAMILY.fields_of({"width": 8, "model_type": "other"})


def test_names_of_tensors() -> None:
    assert FAMILY.tensors_of({"hidden_size": 8}) is FAMILY.tensors
    by_size = dataclasses.replace(FAMILY, tensors=lambda values: {f"of size {values['hidden_size']}": ()})
    assert by_size.tensors_of({"hidden_size": 8}) == {"of size 8": ()}
    assert FAMILY.current_name("norm.gamma") == "norm.weight" and FAMILY.current_name("gamma.x") == "gamma.x"
    assert FAMILY.is_constant("model.layers.3.self_attn.rotary_emb.inv_freq") and not FAMILY.is_constant("norm.gamma")
