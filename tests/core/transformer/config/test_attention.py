"""Impossible values of attention are named, with what would work."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.attention import validate
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 65}, "hidden_size 65 is not divisible by num_attention_heads 4; use 64 or 68"),
        ({"num_query_groups": 3}, "num_query_groups 3 does not divide num_attention_heads 4; use "),
        ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping -1.0 must be larger than 0, or left out"),
        ({"attention_chunk_size": 0}, "attention_chunk_size 0 must be at least 1"),
        ({"qk_layernorm": True, "qk_l2_norm": True}, "qk_layernorm and qk_l2_norm are two norms of queries and keys"),
        (
            {"attention_backend": AttnBackend.fused, "deterministic_mode": True},
            "attention_backend fused: cuDNN sums gradients in an order that varies, so deterministic_mode forbids it",
        ),
        ({"no_rope_freq": 0}, "no_rope_freq 0 must be at least 1"),
        ({"no_rope_freq": [0, 1, 0]}, "no_rope_freq has 3 entries for num_layers 2; give one for each"),
        ({"no_rope_freq": [0, 2]}, "has a 1 for a layer without rotary positions, a 0 for"),
        ({"window_size": (3, 0), "window_attn_skip_freq": -2}, "window_attn_skip_freq -2 must be at least 1"),
        ({"window_attn_skip_freq": [1]}, "window_attn_skip_freq has 1 entries for num_layers 2; give one for each"),
        ({"attention_chunk_skip_freq": [1, 2]}, "attention_chunk_skip_freq 1 2 has a 1 for a layer with chunks"),
        ({"qk_layernorm": True, "qk_norm_scope": "full"}, "qk_norm_scope full is an RMSNorm; it does not go with"),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TransformerConfig(**SMALL | fields)
    assert message in str(caught.value)


def test_defaults_have_no_problem() -> None:
    assert not list(validate(TransformerConfig(**SMALL)))
