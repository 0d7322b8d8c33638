"""Rotary positions as a layer of one's own applies them, against complex products."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams


def rotated(heads: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    turned = 2 * angle.shape[-1]
    kept = heads[..., turned:]
    x, y = (heads[..., 0:turned:2], heads[..., 1:turned:2]) if interleaved else heads[..., :turned].chunk(2, -1)
    result = torch.complex(x, y) * torch.polar(torch.ones_like(angle), angle)[:, None, None, :]
    parts = (result.real, result.imag)
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([joined, kept], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [0.5, 1.0])
def test_heads_are_rotated(interleaved: bool, percent: float) -> None:
    embedding = RotaryEmbedding(8, percent, rotary_interleaved=interleaved)
    angles = embedding(5, 3)
    assert angles.shape == (5, 1, 1, int(8 * percent)) and torch.equal(angles, embedding.get_emb(5, offset=3))
    heads = torch.randn(5, 2, 3, 8)
    found = apply_rotary_pos_emb(heads, angles, SimpleNamespace(rotary_interleaved=interleaved))
    torch.testing.assert_close(found, rotated(heads, embedding.get_freqs_non_repeated(5, 3), interleaved))
    cos, sin = embedding.get_cos_sin(5, 3)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


def test_angles_are_those_of_the_models() -> None:
    embedding = RotaryEmbedding(8, 1.0, seq_len_interpolation_factor=2.0)
    rotation = embedding(torch.arange(4)[None])
    torch.testing.assert_close(rotation.cos[:, 0, 0], embedding.get_cos_sin(4)[0])


def test_the_number_of_positions() -> None:
    config = SimpleNamespace(sequence_parallel=True, tensor_model_parallel_size=2, context_parallel_size=3)
    count = RotaryEmbedding(8, 1.0).get_rotary_seq_len
    assert count(None, None, torch.zeros(4, 1, 8), config) == 24
    assert count(None, SimpleNamespace(input_tensor=torch.zeros(2, 1, 8)), None, config) == 12
    assert count(SimpleNamespace(max_sequence_length=7), None, None, config) == 7
    assert count(None, None, None, config, PackedSeqParams(max_seqlen_q=5, max_seqlen_kv=6)) == 6


def test_what_cannot_be_rotated_is_refused() -> None:
    heads, config = torch.zeros(4, 1, 1, 8), SimpleNamespace()
    with pytest.raises(UserError, match="cu_seqlens"):
        apply_rotary_pos_emb(heads, torch.zeros(4, 1, 1, 8), config, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(UserError, match="4 tokens, but angles of 3 positions"):
        apply_rotary_pos_emb(heads, torch.zeros(3, 1, 1, 8), config)
