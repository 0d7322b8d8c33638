"""Impossible values of initial weights are named, with what would work."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.initialization import validate
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_method_std": float("nan")}, "init_method_std nan must be at least 0"),
        ({"embedding_init_method_std": -0.1}, "embedding_init_method_std -0.1 must be at least 0"),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TransformerConfig(**SMALL | fields)
    assert message in str(caught.value)


def test_defaults_have_no_problem() -> None:
    assert not list(validate(TransformerConfig(**SMALL)))
