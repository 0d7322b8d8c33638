"""Recipes hold the values that the hub publishes, and flags that exist."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.each import for_each

from megatron.conversion.families import FAMILIES, family_of
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table
from megatron.training.config.recipes.catalogue import recipe_named, recipes
from megatron.training.config.recorded_flags import read_recorded
from megatron.training.inspection.print_config import lines_of_words

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).resolve().parents[3] / "data/recipes/published_configs.json").read_text()
)
"""The keys of config.json on the hub that say what a model computes."""
WITHOUT = {
    "BertForMaskedLM",  # BERT's recipes are those of its class with both heads
    "MegatronBertForPreTraining",
    "MegatronBertForMaskedLM",
    "DeciLMForCausalLM",  # its layers differ one by one
}
"""Convertible families without a recipe."""
NOT_OF_DATA = (
    "data",
    "tokenizer",
    "checkpoints",
    "logging",
    "pipeline stages",
    "data parallel",
    "memory",
    "evaluation",
)


def test_there_are_enough_and_each_family_that_can_be_converted_has_one() -> None:
    assert len(recipes()) >= 100
    covered = {recipe.architecture for recipe in recipes().values()}
    assert {family.architecture for family in FAMILIES} - covered == WITHOUT
    assert recipes().keys() - PUBLISHED.keys() == {name for name in recipes() if name.startswith("gpt3-")}


@for_each(PUBLISHED)
def test_the_flags_are_those_that_an_import_would_give(name: str) -> None:
    recipe, config = recipe_named(name), PUBLISHED[name]
    family = family_of(config["architectures"][0])
    assert (recipe.architecture, recipe.model_family) == (family.architecture, family.model_family)
    assert recipe.vocabulary == config["vocab_size"]
    published = family.fields_of(family.complete_config(config))
    line = read_recorded(recipe.words())
    assert not line.problems
    differing = {
        field: (value, line.values[field])
        for field, value in published.items()
        if spelled(field, value, published) != spelled(field, line.values[field], published)
        and not (name.startswith("falcon") and field == "bias_gelu_fusion")  # without biases, nothing is fused
    }
    assert not differing
    other = {field for field in recipe.flags if flag_table()[field].group in OF_MODEL} - published.keys()
    assert other <= OF_TRAINING


OF_MODEL = ("model", "attention", "positions", "mixture of experts", "multi-latent attention", "token mixers")
OF_TRAINING = {
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_router_dtype",
    "moe_router_bias_update_rate",
}


def spelled(field: str, value: Any, published: dict[str, Any]) -> Any:
    """A value, the same for two ways to write it."""
    if field == "kv_channels" and value is None:
        return published["hidden_size"] // published["num_attention_heads"]
    if field == "window_attn_skip_freq" and isinstance(value, int):
        return [int((layer + 1) % value != 0) for layer in range(published["num_layers"])]
    if field == "embedding_multiplier":
        return pytest.approx(value, rel=1e-8)
    return value


@for_each(recipes())
def test_a_recipe_sets_model_optimizer_and_schedule_only(name: str) -> None:
    recipe = recipe_named(name)
    groups = {flag_table()[field].group for field in recipe.flags} - {"data"}
    assert not groups & set(NOT_OF_DATA)
    lengths = {field for field in recipe.flags if flag_table()[field].group == "data"}
    assert lengths <= {"seq_length", "encoder_seq_length", "decoder_seq_length"} and lengths
    assert {"lr", "lr_warmup_fraction"} <= recipe.flags.keys()
    assert len(recipe.source) > 10 and recipe.parameters > 1e7


def test_its_words_are_a_config_file_too() -> None:
    lines = list(lines_of_words(recipe_named("llama3-8b").words()))
    assert "num_layers: 32" in lines and "lr: 0.0003" in lines and "add_bias_linear: false" in lines


def test_a_wrong_name_names_near_ones() -> None:
    with pytest.raises(UserError, match=r"llama3-8: no such recipe; did you mean llama3-8b"):
        recipe_named("llama3-8")
    with pytest.raises(UserError, match=r"zzz: no such recipe; python tools/recipes.py list lists all"):
        recipe_named("zzz")
