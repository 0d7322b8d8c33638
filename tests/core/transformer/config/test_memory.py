"""Impossible values of recomputation are named, with what would work."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.memory import validate
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recompute_granularity": "full"}, "recompute_granularity full needs recompute_method uniform or block"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            "recompute_modules moe: moe is a part of a layer of",
        ),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TransformerConfig(**SMALL | fields)
    assert message in str(caught.value)


def test_defaults_have_no_problem() -> None:
    assert not list(validate(TransformerConfig(**SMALL)))
