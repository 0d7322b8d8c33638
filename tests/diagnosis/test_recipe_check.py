"""Recipes build the published models, and tiny ones of the same kinds train."""

import dataclasses

import pytest

from megatron.diagnosis.recipe_check import count_parameters, train_tiny
from megatron.training.config.recipes.catalogue import recipe_named, recipes
from tools.entry_scripts import BUILDERS, PROVIDERS

MANY_EXPERTS = {name for name, recipe in recipes().items() if recipe.flags.get("num_moe_experts", 0) > 8}
"""Their modules take seconds to build."""
COUNTED = ("llama3-8b", "qwen2.5-0.5b", "gemma3-1b", "mixtral-8x7b", "gpt3-175b", "falcon-7b", "mamba2-130m")
TRAINED = ("llama3-8b", "moonlight-16b-a3b", "t5-v1.1-small", "bert-base", "nemotron-h-8b")


@pytest.mark.fast(*COUNTED)
@pytest.mark.parametrize("name", recipes())
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    recipe = recipe_named(name)
    assert count_parameters(recipe, BUILDERS[recipe.model_family]).is_published


def test_another_size_is_noticed() -> None:
    recipe = recipe_named("gpt2-124m")
    wrong = dataclasses.replace(recipe, parameters=recipe.parameters * 1006 // 1000)
    assert not count_parameters(wrong, BUILDERS["gpt"]).is_published


@pytest.mark.fast(*TRAINED)
@pytest.mark.parametrize("name", recipes())
def test_a_tiny_one_trains(name: str) -> None:
    recipe = recipe_named(name)
    assert len(train_tiny(recipe, PROVIDERS[recipe.model_family])) == 2
