"""Sizes of models: published ones by name and count, scaled ones, and the formula against models that are built."""

import pytest

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.model_shape import shape_of
from megatron.diagnosis.planning.parameter_count import parameter_count
from megatron.diagnosis.planning.published_models import published_models
from megatron.diagnosis.planning.quantities import quantity

PUBLISHED = {model.name: model for model in published_models()}
BY_FORMULA = [model for model in published_models() if model.family == "gpt"]

COUNTS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gpt2-124m": 124_439_808,
    "gpt2-1.5b": 1_557_611_200,
    "gpt3-175b": 174_600_000_000,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "granite3-8b": 8_170_848_256,
    "yi-34b": 34_388_917_248,
    "kimi-k2": 1_026_408_232_448,
}
"""Published parameters, counted by their publishers or from the published weights."""


def test_forty_published_architectures_have_their_counts() -> None:
    assert len(COUNTS) >= 40
    for name, count in COUNTS.items():
        model = PUBLISHED[name]
        by_formula = parameter_count(model.flags, model.vocab_size, model.positions).total
        assert by_formula == pytest.approx(count, rel=0.005), name


def test_the_formula_counts_every_recipe_of_a_gpt() -> None:
    for model in BY_FORMULA:
        if "linear_num_key_heads" not in model.flags:  # gated delta nets are not scaled
            counted = parameter_count(model.flags, model.vocab_size, model.positions).total
            assert counted == pytest.approx(model.parameters, rel=0.005), model.name


@pytest.mark.parametrize("name", COUNTS)
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
        (None, "70B", 128256, "llama3.1-70b"),
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
