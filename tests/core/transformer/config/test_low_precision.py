"""Impossible values of fp8 are named, with what would work."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.low_precision import validate
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp8_recipe": "mxfp8"}, "fp8_recipe mxfp8 needs a Blackwell GPU, here as in Megatron-LM"),
        (
            {"fp8_recipe": "custom"},
            "fp8_recipe custom: it builds quantizers of Transformer Engine, which is not used",
        ),
        ({"fp8_amax_history_len": 0}, "fp8_amax_history_len 0 must be at least 1"),
        ({"fp8_margin": -1}, "fp8_margin -1 must be at least 0"),
        (
            {"num_query_groups": 2, "tensor_model_parallel_size": 4},
            "tensor_model_parallel_size 4: ranks that share a key and value head are not supported in fp8",
        ),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TransformerConfig(**SMALL, **fields, fp8="hybrid")
    assert message in str(caught.value)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_the_recipes_have_no_problem(recipe: Any) -> None:
    assert not list(validate(TransformerConfig(**SMALL, fp8="hybrid", fp8_recipe=recipe)))
