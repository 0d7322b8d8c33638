"""Recomputing heads out of latents: no bit of the numbers changes, and memory does."""

from typing import Any

import pytest
from support.exact_gradients import ROWS, assert_equal, gradients, gradients_of_a_copy, kept_by, recomputing
from support.tiny_models import tiny_config, tiny_gpt

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig

LENGTH, LAYERS = 32, 2
HEADS, KEY, VALUE = 4, 16, 24
"""Widths of a head."""
WAYS: dict[str, list[str]] = {
    "heads": ["mla_up_proj"],
    "heads and attention": ["mla_up_proj", "core_attn"],
    "all": ["mla_up_proj", "core_attn", "layernorm", "mlp"],
}


def build(modules: list[str] | None = None, **settings: Any) -> GPTModel:
    selective = recomputing(*modules) if modules else {}
    plain = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "q_lora_rank": 12}
    config = tiny_config(
        MLATransformerConfig,
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=HEADS,
        kv_lora_rank=10,
        qk_head_dim=10,
        qk_pos_emb_head_dim=KEY - 10,
        v_head_dim=VALUE,
        qk_layernorm=True,
        **{**plain, **selective, **settings},
    )
    return tiny_gpt(config, 50, LENGTH)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"attention_dropout": 0.0}, {"q_lora_rank": None}, {"fp64": False, "bf16": True}],
    ids=["unfused", "fused", "queries at once", "bf16"],
)
def test_no_bit_changes(way: str, settings: dict[str, Any]) -> None:
    assert_equal(gradients(build(WAYS[way], **settings)), gradients(build(**settings)))


def test_a_copied_model_is_recomputed_with_its_own_weights() -> None:
    assert_equal(gradients_of_a_copy(build(WAYS["all"])), gradients(build()))


def test_memory_that_is_kept() -> None:
    """Beside the core of attention, which keeps its arguments alone, what is saved is the heads of all tokens."""
    heads = LENGTH * ROWS * HEADS * 8 * LAYERS
    saved = kept_by(build(["core_attn"])) - kept_by(build(WAYS["heads and attention"]))
    # The projection to keys without positions goes with the values, which are a part of its result.
    assert saved == pytest.approx(heads * (KEY + KEY + VALUE + 10), rel=0.03)
