"""Impossible values of sizes and norms are named, with what would work."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.architecture import validate
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers 0 must be at least 1"),
        ({"hidden_dropout": 1.0}, "hidden_dropout 1.0 must be at least 0 and less than 1"),
        ({"residual_multiplier": 0.0}, "residual_multiplier 0.0 must be a number other than 0"),
        ({"norm_affine": False, "layernorm_zero_centered_gamma": True}, "with norm_affine norms have no weights"),
        (
            {"norm_placement": "post", "apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm: norm_placement post has no norm before attention",
        ),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TransformerConfig(**SMALL | fields)
    assert message in str(caught.value)


def test_defaults_have_no_problem() -> None:
    assert not list(validate(TransformerConfig(**SMALL)))
