"""Recipes build the published models, and tiny ones of the same kinds train."""

import dataclasses

import pytest

from megatron.diagnosis.recipe_check import TOLERANCE, count_parameters, train_tiny
from megatron.training.config.recipes.catalogue import recipe_named, recipes
from tools.entry_scripts import BUILDERS, PROVIDERS

MANY_EXPERTS = {name for name, recipe in recipes().items() if recipe.flags.get("num_moe_experts", 0) > 8}
"""Their modules take seconds to build."""
COUNTED = ("llama3-8b", "qwen2.5-0.5b", "gemma3-1b", "mixtral-8x7b", "gpt3-175b", "falcon-7b", "mamba2-130m")
TRAINED = ("llama3-8b", "phi2", "moonlight-16b-a3b", "t5-v1.1-small", "bert-base", "nemotron-h-8b")


@pytest.mark.fast(*COUNTED)
@pytest.mark.parametrize("name", recipes())
def test_the_number_of_parameters_is_the_stated_one(name: str) -> None:
    recipe = recipe_named(name)
    assert count_parameters(recipe, BUILDERS[recipe.model_family]).is_right


def test_published_numbers_are_those_of_the_recipes() -> None:
    found = {name: recipe for name, recipe in recipes().items() if recipe.published}
    assert len(found) >= 90 and all(recipe.published_in for recipe in found.values())
    far = {
        name: recipe.parameters / recipe.published - 1
        for name, recipe in found.items()
        if abs(recipe.parameters / (recipe.published or 1) - 1) > TOLERANCE
    }
    assert not far


def test_another_size_is_noticed() -> None:
    recipe = recipe_named("qwen2.5-0.5b")
    for field in ("parameters", "published"):
        wrong = dataclasses.replace(recipe, **{field: recipe.parameters * 1006 // 1000})
        assert not count_parameters(wrong, BUILDERS["gpt"]).is_right


@pytest.mark.fast(*TRAINED)
@pytest.mark.parametrize("name", recipes())
def test_a_tiny_one_trains(name: str) -> None:
    recipe = recipe_named(name)
    assert len(train_tiny(recipe, PROVIDERS[recipe.model_family])) == 2
