"""Recomputing heads out of latents: no bit of the numbers changes, and memory does."""

import copy
from typing import Any

import pytest
import torch
from support.kept_memory import kept_bytes
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

LENGTH, ROWS, LAYERS = 32, 2, 2
HEADS, KEY, VALUE = 4, 16, 24
"""Widths of a head."""
SELECTIVE = {"recompute_granularity": "selective"}
WAYS: dict[str, list[str]] = {
    "heads": ["mla_up_proj"],
    "heads and attention": ["mla_up_proj", "core_attn"],
    "all": ["mla_up_proj", "core_attn", "layernorm", "mlp"],
}


def build(modules: list[str] | None = None, **settings: Any) -> GPTModel:
    selective = {**SELECTIVE, "recompute_modules": modules} if modules else {}
    plain = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "q_lora_rank": 12, "fp64": True}
    config = MLATransformerConfig(
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
    return GPTModel(config, gpt_layer_spec_of(config, 1), vocab_size=50, max_sequence_length=LENGTH)


def loss_of(model: torch.nn.Module) -> Tensor:
    ids = torch.randint(50, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    tokens = Tokens(LENGTH, ROWS, random=RngPosition(seed=7, iteration=4, first_sample=6))
    return model(ids[:, :-1], labels=ids[:, 1:].contiguous(), tokens=tokens).sum()


def gradients(model: GPTModel) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].any() for name in one)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"attention_dropout": 0.0}, {"q_lora_rank": None}, {"fp64": False, "bf16": True}],
    ids=["unfused", "fused", "queries at once", "bf16"],
)
def test_no_bit_changes(way: str, settings: dict[str, Any]) -> None:
    assert_equal(gradients(build(WAYS[way], **settings)), gradients(build(**settings)))


def test_a_copied_model_is_recomputed_with_its_own_weights() -> None:
    model = build(WAYS["all"])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal(gradients(twin), gradients(build()))


def kept_by(modules: list[str] | None) -> int:
    model = build(modules)
    return kept_bytes(lambda: loss_of(model))


def test_memory_that_is_kept() -> None:
    """Beside the core of attention, which keeps its arguments alone, what is saved is the heads of all tokens."""
    heads = LENGTH * ROWS * HEADS * 8 * LAYERS
    saved = kept_by(["core_attn"]) - kept_by(WAYS["heads and attention"])
    # The projection to keys without positions goes with the values, which are a part of its result.
    assert saved == pytest.approx(heads * (KEY + KEY + VALUE + 10), rel=0.03)


def test_it_is_a_part_of_latent_attention() -> None:
    with pytest.raises(UserError, match="mla_up_proj is a part of multi_latent_attention, which is not set"):
        TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, **SELECTIVE, recompute_modules=["mla_up_proj"]
        )


# ---------------------------------------------------------------------------------------------------------------------
# Split over ranks, and with sharded parameters
