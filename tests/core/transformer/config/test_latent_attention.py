"""Impossible values of latent attention, and options of other attention that it does not have."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.latent_attention import validate
from megatron.core.transformer.transformer_config import MLATransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank 0 must be at least 1"),
        ({"rotary_scaling_factor": 0.0}, "rotary_scaling_factor 0.0 must be larger than 0"),
        ({"beta_fast": 1.0}, "beta_fast 1.0 must be larger than beta_slow 1"),
        ({"rope_type": "alibi"}, "rope_type alibi: choose among rope, yarn"),
        ({"rotary_percent": 0.01}, "rotates 0 channels of a head; it must be an even number"),
        ({"num_query_groups": 2}, "num_query_groups 2 does not go with multi_latent_attention"),
        ({"clip_qkv": 3.0}, "clip_qkv 3.0 does not go with multi_latent_attention: its queries, keys and values come"),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        MLATransformerConfig(**SMALL | fields)
    assert message in str(caught.value)


def test_other_attention_is_not_looked_at() -> None:
    assert not list(validate(SimpleNamespace(multi_latent_attention=False)))
    assert len(list(validate(SimpleNamespace(multi_latent_attention=True)))) == 1  # the sizes are missing
