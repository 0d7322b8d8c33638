"""The module of relative positions: heads of a rank, bias of attention, refusals."""

import dataclasses

import pytest
import torch
from support.tiny_models import tiny_config

from megatron.core.communication.collectives import PlannedGroup
from megatron.core.exceptions import UserError
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.parameters import info_of
from megatron.core.tokens import Tokens
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.kernels_in_use import attention_of_layer

CONFIG = tiny_config(relative_bias=True)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_a_rank_has_the_numbers_of_its_heads() -> None:
    made = RelativePositionEmbedding(CONFIG, True, 8, 20, tp_group=PlannedGroup((0, 1), 1))
    info = info_of(made.relative_attention_bias.weight)
    assert (info.global_shape, info.box.start, info.box.shape) == ((8, 4), (0, 2), (8, 2))
    assert made(Tokens(5, 3)).shape == (1, 2, 5, 5)


def test_later_tokens_see_the_keys_before_them() -> None:
    made = RelativePositionEmbedding(CONFIG, False, 8, 20)
    assert torch.equal(made(Tokens(2, 1, first_position=4)), made(Tokens(6, 1))[:, :, 4:])


@pytest.mark.parametrize("at_once", [1, 1 << 25])
def test_attention_adds_the_bias_to_its_scores(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.ops.attention.unfused.SCORES_AT_ONCE", at_once)  # also query by query
    query, key, value = (random(5, 2, 4, 4).requires_grad_() for _ in range(3))
    bias = random(1, 4, 5, 5).requires_grad_()
    variant = AttentionVariant(0.5, causal=True, adds_bias=True)
    made = attention(query, key, value, variant, AttentionCall(bias=bias))
    scores = 0.5 * torch.einsum("sbad,tbad->bast", query, key) + bias
    weights = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    expected = torch.einsum("bast,tbad->sbad", weights, value)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    upstream, inputs = random(5, 2, 4, 4), (query, key, value, bias)
    for one, other in zip(
        torch.autograd.grad(made, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def layer(**settings: object) -> DotProductAttention:
    config = dataclasses.replace(CONFIG, attention_dropout=0.0, **settings)
    return DotProductAttention(config, 1, AttnMaskType.causal, "self")


def test_the_choice_of_a_kernel_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_of_layer(layer(), torch.device("cpu")).why == (
        "plain torch, because SDPA (CPU flash) has no gradient of a relative position bias"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = layer(attention_backend=AttnBackend.flash).plan.describe("cuda")
    assert asked.startswith("plain torch, because SDPA (flash) computes in half precision")


def test_a_bias_is_given_where_the_config_says_so() -> None:
    heads = random(5, 2, 4, 4)
    with pytest.raises(UserError, match="attention_bias is missing"):
        layer()(heads, heads, heads)
    with pytest.raises(UserError, match="attention_bias is given"):
        layer(relative_bias=False)(heads, heads, heads, attention_bias=random(1, 4, 5, 5))


@pytest.mark.parametrize(("buckets", "distance", "named"), [(7, 20, "num_buckets"), (2, 20, "num"), (8, 2, "max_dist")])
def test_numbers_without_buckets_are_refused(buckets: int, distance: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        RelativePositionEmbedding(CONFIG, True, buckets, distance)
