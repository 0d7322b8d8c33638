"""Impossible values of positions are named, with what would work."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.positions import validate
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling_type": "longrope"}, "rope_scaling_type longrope needs rope_scaling_short_factor and"),
        (
            {"rope_scaling_type": "longrope", "rope_scaling_short_factor": [1.0], "rope_scaling_long_factor": [1.0, 0]},
            "rope_scaling_short_factor has 1 numbers, rope_scaling_long_factor 2",
        ),
        ({"rope_scaling_beta_fast": 1.0}, "rope_scaling_beta_fast 1.0 must be larger than rope_scaling_beta_slow 1.0"),
        ({"nope_temperature_scale": 0.1}, "nope_temperature_scale 0.1 needs no_rope_freq"),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TransformerConfig(**SMALL | fields)
    assert message in str(caught.value)


def test_defaults_have_no_problem() -> None:
    assert not list(validate(TransformerConfig(**SMALL)))
