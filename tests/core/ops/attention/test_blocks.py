"""Blocks of attention against attention to all keys at once: outputs merge, gradients add up."""

import itertools
from typing import Any

import pytest
import torch
from support import fused_kernels
from torch import Tensor

from megatron.core.ops.attention import blocks as attention_blocks
from megatron.core.ops.attention import blocks_cuda as attention_blocks_cuda
from megatron.core.ops.attention.blocks import (
    BlockCall,
    BlockOffsets,
    block_attention,
    block_attention_backward,
    merge_block,
)
from megatron.core.ops.attention.blocks_cuda import fused_block_attention, fused_block_attention_backward
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.ops.dropout.dropout import DropoutRngPosition, dropout_tokens
from megatron.core.tokens import RngPosition, Tokens

S, B, HEADS, GROUPS = 13, 2, 4, 2
CUTS = [0, 3, 4, 9, S]
EDGES = [0, 2, 7, 7, 10, S]


def problem(b: int) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(S, b, HEADS, 6), (S, b, GROUPS, 6), (S, b, GROUPS, 5), (S, b, HEADS, 5)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def by_blocks(variant: AttentionVariant, call: BlockCall, forward: Any, backward: Any, b: int = B) -> list[Tensor]:
    """Output and gradients of attention that is computed and merged in blocks of uneven sizes."""
    query, key, value, gradient = problem(b)
    output, lse = torch.zeros_like(gradient), query.new_full((b, HEADS, S), -torch.inf)
    left, right = variant.reach
    blocks = []
    for q, k in itertools.product(itertools.pairwise(CUTS), itertools.pairwise(CUTS)):
        if variant.causal and k[0] >= q[1]:
            continue
        offset = k[0] - q[0]
        limits = (None if left is None else left + offset, None if right is None else right - offset)
        blocks.append((slice(*q), slice(*k), BlockOffsets(q[0], k[0], *limits)))
    for q, k, place in blocks:
        part, part_lse = forward(query[q], key[k], value[k], place, variant, call)
        merge_block(output[q], lse[..., q], part, part_lse)
    gradients = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for q, k, place in blocks:
        tensors = query[q], key[k], value[k], output[q], lse[..., q]
        for total, rows, part in zip(
            gradients, (q, k, k), backward(gradient[q], *tensors, place, variant, call), strict=True
        ):
            total[rows] += part
    return [output, *gradients]


def whole(variant: AttentionVariant, call: AttentionCall, b: int = B) -> list[Tensor]:
    *inputs, gradient = problem(b)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    output = attention(*inputs, variant, call)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def agree(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-13 * theirs.abs().max()


VARIANTS = {
    "causal": AttentionVariant(0.4, True),
    "all keys": AttentionVariant(0.4, False),
    "window": AttentionVariant(0.4, True, window=(3, 0)),
    "window both ways": AttentionVariant(0.4, False, window=(2, 4)),
    "bounded": AttentionVariant(0.4, True, cap=0.7),
    "ALiBi": AttentionVariant(0.4, False, slopes=(0.5, 0.25, 0.1, 0.05)),
    "bounded, ALiBi, window": AttentionVariant(0.4, True, window=(3, 0), cap=0.7, slopes=(0.5, 0.25, 0.1, 0.05)),
}
UNFUSED = block_attention, block_attention_backward


@pytest.mark.parametrize("scores_at_once", [1 << 25, 2 * 4 * 5 * 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_unfused_blocks(name: str, scores_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "SCORES_AT_ONCE", scores_at_once)  # a few queries at a time
    agree(by_blocks(VARIANTS[name], BlockCall(), *UNFUSED), whole(VARIANTS[name], AttentionCall()))


@pytest.mark.parametrize("packed", [False, True])
def test_unfused_blocks_with_dropout(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "SCORES_AT_ONCE", 2 * 4 * 5 * 2)
    b, variant = 1 if packed else B, AttentionVariant(0.4, True, dropout=0.4)
    edges = torch.tensor(EDGES, dtype=torch.int32) if packed else None
    tokens = dropout_tokens(Tokens(S, b, random=RngPosition(3, 5, 2**31)), torch.device("cpu"))
    place = DropoutRngPosition(tokens, 2, "attention")
    call = BlockCall(edges, S, place, tokens.index[:b], first_head=8)
    agree(
        by_blocks(variant, call, *UNFUSED, b),
        whole(variant, AttentionCall(cu_seqlens=edges, dropout=place, first_head=8), b),
    )


@pytest.mark.parametrize("with_cudnn", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["causal", "window"])
def test_what_surrounds_fused_kernels(
    name: str, packed: bool, with_cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in ("flash_forward", "flash_backward", "cudnn_forward", "cudnn_backward"):
        monkeypatch.setattr(attention_blocks_cuda, kernel, getattr(fused_kernels, kernel))
    monkeypatch.setattr(attention_blocks_cuda, "cudnn_takes", lambda *heads: True)
    b, variant = 1 if packed else B, VARIANTS[name]
    edges = torch.tensor(EDGES, dtype=torch.int32) if packed else None

    def forward(query, key, value, place, *rest):
        rows, keys, place = smallest(query, key, place)
        output, lse = query.new_zeros(*query.shape[:3], 5), query.new_full((b, HEADS, len(query)), -torch.inf)
        if rows is not None:
            output[rows], lse[..., rows] = fused_block_attention(
                query[rows], key[keys], value[keys], place, *rest, with_cudnn=with_cudnn
            )
        return output, lse

    def backward(gradient, query, key, value, output, lse, place, *rest):
        found = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        rows, keys, place = smallest(query, key, place)
        if rows is not None:
            tensors = gradient[rows], query[rows], key[keys], value[keys], output[rows], lse[..., rows]
            parts = fused_block_attention_backward(*tensors, place, *rest, with_cudnn=with_cudnn)
            for total, part, at in zip(found, parts, (rows, keys, keys), strict=True):
                total[at] = part
        return found

    found = by_blocks(variant, BlockCall(edges, 5), forward, backward, b)
    agree(found, whole(variant, AttentionCall(cu_seqlens=edges, max_seqlen=5), b))


def smallest(query: Tensor, key: Tensor, place: BlockOffsets) -> tuple[slice | None, slice, BlockOffsets]:
    """The block without the queries and keys that no pair is of, which is what the kernels are given."""
    met = [
        (i, j)
        for i, j in itertools.product(range(len(query)), range(len(key)))
        if (place.left is None or j >= i - place.left) and (place.right is None or j <= i + place.right)
    ]
    if not met:
        return None, slice(0, 0), place
    (i, *_), (j, *_) = sorted({i for i, _ in met}), sorted({j for _, j in met})
    rows, keys = slice(i, max(i for i, _ in met) + 1), slice(j, max(j for _, j in met) + 1)
    left = None if place.left is None else place.left + j - i
    right = None if place.right is None else place.right - j + i
    return rows, keys, BlockOffsets(place.query_start + i, place.key_start + j, left, right)


def test_half_types() -> None:
    variant = VARIANTS["causal"]
    query, key, value, gradient = (tensor.bfloat16() for tensor in problem(B))
    place = BlockOffsets(0, 0, None, 0)
    output, lse = block_attention(query, key, value, place, variant, BlockCall())
    parts = block_attention_backward(gradient, query, key, value, output, lse, place, variant, BlockCall())
    assert output.dtype is torch.bfloat16 and lse.dtype is torch.float32
    for ours, theirs in zip([output, *parts], whole(variant, AttentionCall()), strict=True):
        assert (ours.double() - theirs).abs().max() < 2e-2 * theirs.abs().max()


def test_queries_that_have_seen_no_key_merge_to_nothing() -> None:
    total, total_lse = torch.zeros(3, 1, 1, 2), torch.full((1, 1, 3), -torch.inf)
    merge_block(total, total_lse, torch.ones(3, 1, 1, 2), torch.tensor([[[-torch.inf, 0.5, -torch.inf]]]))
    assert total[:, 0, 0, 0].tolist() == [0.0, 1.0, 0.0] and total_lse[0, 0].tolist() == [-torch.inf, 0.5, -torch.inf]
