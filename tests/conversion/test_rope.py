"""Rotary positions in config.json, as transformers reads them."""

import random
from typing import Any

import pytest
import transformers

from megatron.conversion.config_json import with_defaults
from megatron.conversion.rope import RotaryPositions
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

OLD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {"rotary_base": 10000}),
    "base": ({"rope_theta": 500000.0, "rope_scaling": None}, {"rotary_base": 500000}),
    "linear, type": (
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
    ),
    "yarn, from the length that the model has": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_scaling_original_length": 32768},
    ),
    "llama3": (
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rotary_base": 500000, "rope_scaling_type": "llama3", "rope_scaling_factor": 32.0},
    ),
}


def fields_of(config: dict[str, Any]) -> dict[str, Any]:
    return RotaryPositions().fields(with_defaults({"max_position_embeddings": 32768} | config, "llama"))


def of_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary keys that today's transformers writes for a config.json."""
    written = transformers.LlamaConfig(**({"max_position_embeddings": 32768} | config)).to_dict()
    assert "rope_theta" not in written
    return {"rope_parameters": written["rope_parameters"]}


@pytest.mark.parametrize("name", OLD)
def test_the_forms_of_old_and_new_releases_mean_the_same(name: str) -> None:
    old, expected = OLD[name]
    assert expected.items() <= fields_of(old).items()
    assert fields_of(of_transformers(old)) == fields_of(old)


@pytest.mark.parametrize("name", OLD)
def test_what_is_written_means_the_same_to_us_and_to_transformers(name: str) -> None:
    fields = fields_of(OLD[name][0])
    values = {field: flag.default for field, flag in flag_table().items()} | fields
    keys = RotaryPositions().keys(values)
    assert fields_of(keys) == fields == fields_of(of_transformers(keys))


def test_rope_scaling_comes_before_rope_parameters() -> None:
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    fields = fields_of(both)
    assert (fields["rope_scaling_type"], fields["rotary_base"]) == ("linear", 10000)
    assert fields == fields_of(of_transformers(both))


@pytest.mark.parametrize("seed", range(40))
def test_any_combination_is_read_as_transformers_does(seed: int) -> None:
    draw = random.Random(seed)

    def some_rope() -> dict[str, Any] | None:
        kinds: list[dict[str, Any] | None] = [None, {}, {"rope_type": "default"}, LLAMA3]
        kinds += [{name: "linear", "factor": 3.0} for name in ("type", "rope_type")]
        kinds += [{"rope_type": "yarn", "factor": 3.0, "beta_fast": 16.0}]
        rope = draw.choice(kinds)
        theta = draw.choice([{}, {"rope_theta": draw.choice([20000.0, 30000])}])
        return rope if rope is None else rope | theta

    config: dict[str, Any] = {key: some_rope() for key in ("rope_scaling", "rope_parameters") if draw.random() < 0.7}
    config |= draw.choice([{}, {"rope_theta": 40000.0}])
    assert fields_of(config) == fields_of(of_transformers(config)), config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling with rope_type 'linear' has no factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling with rope_type 'llama3' has no low_freq_factor, high_freq_factor",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "rope_parameters has short_factor None, but it must be a list of numbers",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "beta_fast": 2.0}},
            "rope_parameters with rope_type 'longrope' has beta_fast, which is unsupported",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling has factor None, but it must be a number"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}},
            "rope_scaling with rope_type 'dynamic' has alpha, which is unsupported",
        ),
        (
            {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}},
            "rope_parameters has rope_type 'ntk'; default, linear, llama3, yarn, dynamic, longrope are supported",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            "rope_parameters with rope_type 'yarn' has mscale, which is unsupported",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters has parameters for each type of layer (full_attention, sliding_attention), which are "
            "unsupported",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters with rope_type 'default' has partial_rotary_factor, which is unsupported",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            "rope_scaling has factor '2', but it must be a number",
        ),
        ({"rope_theta": 10000.5}, "rope_theta is 10000.5; only integers are supported"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta is None; only integers are supported"),
    ],
)
def test_what_is_unsupported_is_named_by_its_key(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        fields_of(config)
    assert str(refusal.value) == said
