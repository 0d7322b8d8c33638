"""Norms of queries and keys without weights, and over all heads; `models/gpt` has them over ranks."""

import pytest
import torch
from support.tiny_models import tiny_config

from megatron.core.communication.collectives import PlannedGroup
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box, info_of
from megatron.core.transformer.query_key_norms import AllHeadsNorm, L2Norm
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**fields: str) -> TransformerConfig:
    return tiny_config(hidden_size=24, num_attention_heads=6, fp64=False, **{"normalization": "RMSNorm"} | fields)


def test_a_head_has_a_root_mean_square_of_one() -> None:
    x = torch.randn(5, 2, 6, 4)
    assert not list(L2Norm(config(), 4).parameters())
    torch.testing.assert_close(L2Norm(config(), 4)(x), x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


def test_all_heads_are_one_vector() -> None:
    made = AllHeadsNorm(config(), 24)
    torch.nn.init.normal_(made.weight)
    x = torch.randn(5, 2, 6, 4)
    torch.testing.assert_close(
        made(x), torch.nn.functional.rms_norm(x.flatten(2), (24,), made.weight, 1e-5).view(x.shape)
    )


@pytest.mark.parametrize(("heads", "first", "rows"), [(6, 0, 8), (2, 4, 8)])
def test_a_rank_has_its_heads_or_all_of_few(heads: int, first: int, rows: int) -> None:
    """Three ranks: two of six heads each; or two heads, of which the third rank uses the second."""
    made = AllHeadsNorm(config(), heads * 4, tp_group=PlannedGroup((0, 1, 2), 2))
    info = info_of(made.weight)
    assert made.weight.shape == (rows,) and made.first == first
    assert info.box == (Box((16,), (8,)) if heads == 6 else Box((0,), (8,)))
    assert info.partial_gradient_axes == ({"tp"} if heads == 2 else set())


def test_only_of_the_kind_rmsnorm() -> None:
    with pytest.raises(UserError, match="qk_norm_scope full is an RMSNorm"):
        AllHeadsNorm(config(normalization="LayerNorm"), 24)
