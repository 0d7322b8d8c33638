"""Values of config.json are checked and completed."""

from typing import Any

import pytest

from megatron.conversion.config_json import with_defaults
from megatron.core.exceptions import UserError


def test_null_is_not_absent() -> None:
    assert with_defaults({"sliding_window": None}, "mistral")["sliding_window"] is None
    with pytest.raises(UserError, match=r"^rms_norm_eps is None, but must be a number$"):
        with_defaults({"rms_norm_eps": None}, "llama")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_hidden_layers", "3", "an integer"),
        ("num_hidden_layers", True, "an integer"),
        ("num_key_value_heads", 2.0, "an integer"),
        ("tie_word_embeddings", "false", "true or false"),
        ("tie_word_embeddings", 1, "true or false"),
        ("rms_norm_eps", float("nan"), "a number"),
        ("rope_scaling", "linear", "an object"),
        ("hidden_act", 3, "a string"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(key: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError, match=f"^{key} is {value!r}, but must be {expected}$"):
        with_defaults({key: value}, "llama")


@pytest.mark.parametrize(
    ("model_type", "key", "alias"),
    [
        ("qwen3_moe", "num_experts", "num_local_experts"),
        ("mixtral", "num_local_experts", "num_experts"),
    ],
)
def test_a_key_has_two_names(model_type: str, key: str, alias: str) -> None:
    for config in ({key: 7}, {alias: 7}, {key: 7, alias: 7}, {key: 7, alias: None}):
        completed = with_defaults(config, model_type)
        assert completed[key] == 7 and alias not in completed
    with pytest.raises(UserError, match=f"^{key} is 7, but {alias} is 8; they are the same setting$"):
        with_defaults({key: 7, alias: 8}, model_type)
