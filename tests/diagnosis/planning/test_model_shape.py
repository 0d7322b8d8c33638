"""Sizes of models: published ones by name and count, scaled ones, and the formula against models that are built."""

import pytest
from support.each import for_each

from megatron.core.declarations.flag_grammars import layer_pattern
from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.model_shape import shape_of
from megatron.diagnosis.planning.parameter_count import parameter_count
from megatron.diagnosis.planning.published_models import published_models
from megatron.diagnosis.planning.quantities import quantity
from megatron.training.config.recipes.catalogue import recipes

PUBLISHED = {model.name: model for model in published_models()}
BY_FORMULA = [model for model in published_models() if model.family == "gpt"]

COUNTS = {
    model.name: recipes()[model.name].published
    for model in BY_FORMULA
    if recipes()[model.name].published and "linear_attention_freq" not in model.flags  # these are not scaled
}
"""Numbers of parameters that publishers or files on the hub say."""


def test_forty_published_architectures_have_their_counts() -> None:
    assert len(COUNTS) >= 80
    for name, count in COUNTS.items():
        model = PUBLISHED[name]
        by_formula = parameter_count(model.flags, model.vocab_size, model.positions).total
        assert by_formula == pytest.approx(count, rel=0.005), name


def test_the_formula_counts_every_recipe_of_a_gpt() -> None:
    for model in BY_FORMULA:
        if "linear_attention_freq" not in model.flags:  # gated delta nets are not scaled
            counted = parameter_count(model.flags, model.vocab_size, model.positions).total
            assert counted == pytest.approx(model.parameters, rel=0.005), model.name


@for_each(COUNTS)
def test_a_published_model_is_found_by_name_and_count(name: str) -> None:
    model = PUBLISHED[name]
    found = shape_of(name, quantity(str(COUNTS[name])), model.vocab_size, model.training.get("seq_length", 4096))
    assert found.basis.name == name and found.flags == model.flags
    assert found.parameters == pytest.approx(COUNTS[name], rel=0.005)


@pytest.mark.parametrize(
    ("architecture", "params", "vocab_size", "name"),
    [
        ("Llama-style decoder-only", "7B", 32000, "llama2-7b"),
        ("Llama-style decoder-only", "13e9", 32000, "llama2-13b"),
        ("Llama 3", "8B", None, "llama3-8b"),
        ("Llama 3.1 405B", "405B", 128256, "llama3.1-405b"),
        ("GPT-3", "175B", 50257, "gpt3-175b"),
        ("Mixtral-style mixture of experts", "8x7B", 32000, "mixtral-8x7b"),
        ("Qwen2.5", "7B", None, "qwen2.5-7b"),
        ("Qwen3 MoE", "30B", None, "qwen3-30b-a3b"),
        ("DeepSeek-V3", "671B total, 37B active", None, "deepseek-v3"),
        ("Mamba-2", "2.7B", None, "mamba2-2.7b"),
        ("Mamba-2 hybrid (Nemotron-H)", "8B", None, "nemotron-h-8b"),
        ("Llama 4", "108B", None, "llama4-scout-17b-16e"),
        (None, "70B", 128256, "llama3.1-70b"),
        (None, "405B", 128256, "llama3.1-405b"),
    ],
)
def test_words_for_an_architecture(architecture, params, vocab_size, name) -> None:
    found = shape_of(architecture, quantity(params), vocab_size, 4096)
    assert found.basis.name == name and found.flags == PUBLISHED[name].flags


@pytest.mark.parametrize(
    ("architecture", "params", "vocab_size"),
    [
        ("Llama-style", "10M", 32000),
        ("Llama-style", "125M", 32000),
        ("Llama-style", "7,000,000,000", 128256),
        ("Llama-style", "200B", 128256),
        ("Llama-style", "2T", 128256),
        ("GPT-style", "3,000,000,000", 50257),
        ("DeepSeek-V3 style", "100B", 129280),
        ("Qwen3 MoE", "12B", 151936),
    ],
)
def test_scaled_sizes_have_the_count_and_can_be_built(architecture, params, vocab_size) -> None:
    found = shape_of(architecture, quantity(params), vocab_size, 4096)
    flags = found.flags
    assert found.parameters == pytest.approx(quantity(params).value, rel=0.005)
    assert flags["hidden_size"] % flags["num_attention_heads"] == 0
    assert flags["num_attention_heads"] % flags.get("num_query_groups", 1) == 0
    assert found.active_parameters <= found.parameters
    assert set(found.reasons) >= {name for name, value in flags.items() if value is not None}


PATTERNED = [
    model.name
    for model in BY_FORMULA
    if "linear_attention_freq" not in model.flags and any("+" in str(value) for value in model.flags.values())
]


@pytest.mark.slow_cases("ernie4.5-300b-a47b", "llama4-scout-17b-16e", "deepseek-v2")  # smaller or larger ones are fast
@pytest.mark.parametrize("name", PATTERNED)
def test_what_is_said_by_layer_is_scaled_with_the_depth(name: str) -> None:
    model = PUBLISHED[name]
    flags = shape_of(name, quantity(str(1.6 * model.parameters)), model.vocab_size, 4096).flags
    assert flags != model.flags
    for field in ("no_rope_freq", "window_attn_skip_freq", "attention_chunk_skip_freq", "moe_layer_freq"):
        if "[" in str(flags.get(field)):
            kinds, published = layer_pattern(flags[field]), layer_pattern(model.flags[field])
            assert len(kinds) == flags["num_layers"]
            assert all(kind == other for kind, other in zip(kinds, published, strict=False))


def test_sizes_that_do_not_exist() -> None:
    with pytest.raises(UserError, match=r"1.*fewer entries or more parameters"):
        shape_of("Llama-style", quantity("1M"), 128256, 4096)
    with pytest.raises(UserError, match=r"published sizes only.*nearest: 129M or"):
        shape_of("Mamba-2", quantity("900B"), None, 4096)


def test_an_unknown_architecture_is_said() -> None:
    (note,) = shape_of("Perceiver", quantity("7B"), 32000, 4096).notes
    assert note == "architecture 'Perceiver' names no published family; planned as Llama-style"


def test_a_masked_objective_is_a_bert() -> None:
    found = shape_of("BERT", quantity("340M"), 30522, 512, "masked")
    assert found.basis.name == "bert-large" and found.basis.family == "bert"
