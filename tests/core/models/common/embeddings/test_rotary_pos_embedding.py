"""Rotary angles, which models have them, and scales of queries; `ops/test_rope_frequencies` has the scalings."""

from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    Positions,
    RotaryEmbedding,
    choose_rotary_embeddings,
    query_scale,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

SMALL: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
POSITIONS = torch.tensor([[0, 1, 7], [2, 3, 4]])


def choose(config: TransformerConfig, kind: str = "rope", **fields: Any) -> tuple[Any, Any]:
    return choose_rotary_embeddings(
        config, Positions(kind, **{"rotary_base": 100.0, "rope_scaling_factor": 8.0, **fields})
    )


def test_angles() -> None:
    found = RotaryEmbedding(8, 0.5, rotary_base=100, seq_len_interpolation_factor=2.0)(POSITIONS)
    angle = POSITIONS.t()[:, :, None, None].float() / 2.0 * torch.tensor([1.0, 0.1])  # 4 of 8 channels
    torch.testing.assert_close(found.cos, angle.cos())
    torch.testing.assert_close(found.sin, angle.sin())


def test_angles_stay_float32_in_a_half_precision_model() -> None:
    assert RotaryEmbedding(8, 1.0).bfloat16()(POSITIONS).cos.dtype is torch.float32


def test_models_without_rotary_positions_and_windows_with_their_own() -> None:
    config = TransformerConfig(**SMALL)
    assert choose(config, "learned_absolute") == (None, None)
    rotary, local = choose(config)
    assert rotary.rotary_dim == 8 and local is None
    _, local = choose(TransformerConfig(**SMALL, window_size=(3, 0), rotary_base_local=10.0))
    assert local.rotary_base == 10.0


def test_latent_attention_takes_its_config() -> None:
    config = MLATransformerConfig(**SMALL, rotary_base=77.0, qk_pos_emb_head_dim=16, rope_type="rope")
    rotary, local = choose(config, "none", rotary_base=100.0)
    assert (rotary.rotary_base, rotary.rotary_dim, rotary.rotary_interleaved, local) == (77.0, 16, True, None)


def test_scalings_that_contradict_each_other_or_a_cache() -> None:
    yarn = TransformerConfig(**SMALL, rope_scaling_type="yarn")
    with pytest.raises(UserError, match="rope_scaling asks for llama3, rope_scaling_type for yarn"):
        choose(yarn, rope_scaling=True)
    dynamic, _ = choose(TransformerConfig(**SMALL, rope_scaling_type="dynamic", rope_scaling_original_length=16))
    dynamic.check_cache(16)
    with pytest.raises(UserError, match="an inference context of 17 tokens is longer than 16"):
        dynamic.check_cache(17)


def test_queries_grow_by_steps() -> None:
    config = TransformerConfig(**SMALL, no_rope_freq=1, nope_temperature_scale=0.1, nope_temperature_floor=4)
    scale = query_scale(config, POSITIONS)
    assert scale is not None and scale.shape == (3, 2, 1, 1)
    expected = 1 + 0.1 * torch.log1p(torch.floor((POSITIONS.t() + 1.0) / 4))
    torch.testing.assert_close(scale[:, :, 0, 0], expected)
    assert query_scale(TransformerConfig(**SMALL), POSITIONS) is None
