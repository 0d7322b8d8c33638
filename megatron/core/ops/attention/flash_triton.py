"""Our own flash attention on a GPU, for what cuDNN's and torch's kernels cannot compute (our dropout masks, soft caps,
softmax sinks, ALiBi, relative position biases), and for packed documents and long rows, where it is faster.
docs/decisions/own-flash-attention.md says how it works.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.attention.blocks import BlockCall, BlockOffsets
from megatron.core.ops.attention.flash_backward_triton import flash_backward_triton, reads_bits_by_key
from megatron.core.ops.attention.flash_forward_triton import (
    LOG2_E,
    Scores,
    Sight,
    TileSize,
    flash_forward_triton,
    padded_heads,
)
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, document_of
from megatron.core.ops.dropout.keep_bits_triton import BLOCK, KeepBits, SeenKeys, keep_bits_triton
from megatron.core.ops.gluon import gluon_kernel
from megatron.core.utils.autograd_context import AutogradContext

_LARGEST_BITS = 1 << 29
"""Bytes of dropout bits that forward keeps for backward. A call with more computes some heads at a time, and backward
draws the bits again."""
_FORWARD_TILES = {
    64: TileSize(64, 128, 4, 2, bulk_loads=True),
    128: TileSize(64, 64, 4, 3, bulk_loads=True),
    256: TileSize(64, 64, 8, 2),
}
_BACKWARD_TILES = {
    64: TileSize(64, 64, 4, 3, bulk_loads=True, folds=True, heads_first=True),
    128: TileSize(64, 128, 8, 2, folds=True, heads_first=True),
    256: TileSize(32, 64, 8, 2),
}
"""The fastest tiles on an H200. A key is the largest number of channels of a head that takes these tiles. Tiles for 128
channels are tuned for packed documents, because cuDNN computes most other calls."""
_FORWARD_TILES_WITH_DROPOUT = {64: TileSize(64, 64, 4, 2, bulk_loads=True), 128: TileSize(64, 64, 4, 3)}
_BACKWARD_TILES_WITH_DROPOUT = {
    64: TileSize(64, 64, 4, 3, bulk_loads=True, by_query=True, heads_first=True),
    128: TileSize(64, 128, 8, 3),
}
"""Tiles that replace the ones above in calls with dropout."""


def has_specialized_warps() -> bool:
    """Returns whether this GPU computes plain layers by the kernels with specialised warps (Hopper)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    return all(gluon_kernel(f"attention.flash_{name}_specialized_triton") for name in ("forward", "backward"))


def flash_attention_triton(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall
) -> Tensor:
    """Computes `unfused.attention` for heads of at most 256 channels. A mask may only hide keys: [b or 1, 1, 1, sk].

    Computes in float32; probabilities and their gradients are rounded to the inputs' type for the products. A query
    that sees no key gets zeros. The gradients of queries are summed in an order that differs from run to run,
    except in deterministic mode.
    """
    assert call.query_positions is None
    value_width = value.shape[3]
    query, key, value = (padded_heads(heads) for heads in (query, key, value))
    drops = call.dropout is not None and variant.dropout > 0.0
    size, groups = BLOCK.value, key.shape[2]
    blocks = query.shape[1] * query.shape[2] * -(-query.shape[0] // size) * -(-key.shape[0] // size) if drops else 0
    pieces = -(-blocks * size * size // 8 // _LARGEST_BITS)
    if pieces <= 1:
        output = _FlashAttention.apply(query, key, value, call.sink, call.bias, variant, call, True)
        return output[..., :value_width]
    at_once, shared = max(1, groups // pieces), query.shape[2] // groups
    outputs = []
    for number, (q, k, v) in enumerate(
        zip(query.split(at_once * shared, 2), key.split(at_once, 2), value.split(at_once, 2), strict=True)
    ):
        first = number * at_once * shared
        sink = None if call.sink is None else call.sink[first : first + q.shape[2]]
        bias = call.bias
        if bias is not None and bias.shape[-3] > 1:
            bias = bias[..., first : first + q.shape[2], :, :]
        its_call = dataclasses.replace(call, first_head=call.first_head + first)
        outputs.append(_FlashAttention.apply(q, k, v, sink, bias, variant, its_call, False))
    return torch.cat(outputs, 2)[..., :value_width]


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        bias: Tensor | None,
        variant: AttentionVariant,
        call: AttentionCall,
        keeps_bits: bool,
    ) -> Tensor:
        sight, scores = _sight_of_rows(query, key, variant, call), _scores_of(variant, call.first_head, query)
        biased = _with_bias(scores, bias, query, key)
        by_key = reads_bits_by_key(query, key, value, biased, sight)
        bits = _bits_of_rows(query, key, variant, call, True, by_key and keeps_bits)
        output, lse = flash_forward_triton(
            query, key, value, sink, biased, sight, bits, variant.dropout, _forward_tile(query, value, bits)
        )
        kept = None
        if bits is not None and keeps_bits:
            kept = bits.by_key if by_key else bits.by_query
        ctx.save_for_backward(query, key, value, sink, bias, output, lse, kept)
        ctx.variant, ctx.call, ctx.scores, ctx.sight, ctx.by_key = variant, call, scores, sight, by_key
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, sink, bias, output, lse, kept = ctx.saved_tensors
        if kept is not None:
            bits: KeepBits | None = KeepBits(None, kept) if ctx.by_key else KeepBits(kept, None)
        else:
            bits = _bits_of_rows(query, key, ctx.variant, ctx.call, not ctx.by_key, ctx.by_key)
        bias_gradient = bias_parts = None
        if bias is not None and ctx.needs_input_grad[4]:
            bias_gradient = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
            bias_parts = bias_gradient.expand(query.shape[1], query.shape[2], query.shape[0], key.shape[0])
        query_gradient, key_gradient, value_gradient, delta = flash_backward_triton(
            gradient, query, key, value, output, lse, _with_bias(ctx.scores, bias, query, key), ctx.sight, bits,
            ctx.variant.dropout, _backward_tile(query, value, bits), query.dtype, bias_parts,
        )  # fmt: skip
        if bias_gradient is not None:
            if bits is not None:
                bias_gradient /= 1.0 - ctx.variant.dropout
            bias_gradient = bias_gradient.to(bias.dtype)
        sink_gradient = None
        if sink is not None and ctx.needs_input_grad[3]:  # the sink has a probability but no value
            probability = torch.exp(sink.float()[None, :, None] - lse)
            sink_gradient = -(probability * delta).sum((0, 2)).to(sink.dtype)
        return query_gradient, key_gradient, value_gradient, sink_gradient, bias_gradient, None, None, None


def flash_block_attention_triton(
    query: Tensor, key: Tensor, value: Tensor, offsets: BlockOffsets, variant: AttentionVariant, call: BlockCall
) -> tuple[Tensor, Tensor]:
    """Computes `blocks.block_attention` for heads of at most 256 channels."""
    value_width = value.shape[3]
    query, key, value = (padded_heads(heads) for heads in (query, key, value))
    bits = _bits_of_block(query, key, offsets, variant, call, by_key=False)
    output, lse = flash_forward_triton(
        query, key, value, None, _scores_of(variant, call.first_head, query),
        _sight_of_block(query, key, offsets, call), bits, variant.dropout, _forward_tile(query, value, bits),
    )  # fmt: skip
    return output[..., :value_width], lse


def flash_block_attention_backward_triton(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    offsets: BlockOffsets,
    variant: AttentionVariant,
    call: BlockCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `blocks.block_attention_backward`. The gradient of the query is float32."""
    width, value_width = query.shape[3], value.shape[3]
    gradient, query, key, value, output = (padded_heads(heads) for heads in (gradient, query, key, value, output))
    scores, sight = _scores_of(variant, call.first_head, query), _sight_of_block(query, key, offsets, call)
    bits = _bits_of_block(query, key, offsets, variant, call, reads_bits_by_key(query, key, value, scores, sight))
    query_gradient, key_gradient, value_gradient, _ = flash_backward_triton(
        gradient, query, key, value, output, lse, scores, sight, bits, variant.dropout,
        _backward_tile(query, value, bits), torch.float32,
    )  # fmt: skip
    return query_gradient[..., :width], key_gradient[..., :width], value_gradient[..., :value_width]


# ---------------------------------------------------------------------------------------------------------------------
# From calls to the kernels' arguments


def _forward_tile(query: Tensor, value: Tensor, bits: KeepBits | None) -> TileSize:
    return _tile(_FORWARD_TILES if bits is None else _FORWARD_TILES | _FORWARD_TILES_WITH_DROPOUT, query, value)


def _backward_tile(query: Tensor, value: Tensor, bits: KeepBits | None) -> TileSize:
    return _tile(_BACKWARD_TILES if bits is None else _BACKWARD_TILES | _BACKWARD_TILES_WITH_DROPOUT, query, value)


def _tile(tiles: dict[int, TileSize], query: Tensor, value: Tensor) -> TileSize:
    width = max(query.shape[3], value.shape[3])
    return next(tiles[widest] for widest in sorted(tiles) if width <= widest)


def _scores_of(variant: AttentionVariant, first_head: int, query: Tensor) -> Scores:
    slopes = None if variant.slopes is None else _slopes_on(variant.slopes, query.device)
    slopes = None if slopes is None else slopes[first_head : first_head + query.shape[2]]
    return Scores(variant.scale, variant.cap, slopes)


def _with_bias(scores: Scores, bias: Tensor | None, query: Tensor, key: Tensor) -> Scores:
    if bias is None:
        return scores
    return dataclasses.replace(scores, bias=bias.expand(query.shape[1], query.shape[2], query.shape[0], key.shape[0]))


@functools.lru_cache(maxsize=16)
def _slopes_on(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor([slope * LOG2_E for slope in slopes], dtype=torch.float32, device=device)


def _sight_of_rows(query: Tensor, key: Tensor, variant: AttentionVariant, call: AttentionCall) -> Sight:
    longer = key.shape[0] - query.shape[0]  # the queries are the last keys
    hidden = None
    if call.mask is not None:
        hidden = call.mask.expand(query.shape[1], 1, 1, key.shape[0])[:, 0, 0].to(torch.int8).contiguous()
    edges = None if call.cu_seqlens is None else edges_of_documents(call.cu_seqlens, key.shape[0])
    left, right = variant.reach
    # Positions within the block: query i is at i + longer.
    return Sight(
        longer, 0, None if left is None else left - longer, None if right is None else right + longer, edges, hidden
    )


def _sight_of_block(query: Tensor, key: Tensor, offsets: BlockOffsets, call: BlockCall) -> Sight:
    length = max(offsets.query_start + query.shape[0], offsets.key_start + key.shape[0])
    edges = None if call.cu_seqlens is None else edges_of_documents(call.cu_seqlens, length)
    return Sight(offsets.query_start, offsets.key_start, offsets.left, offsets.right, edges)


def edges_of_documents(cu_seqlens: Tensor, length: int) -> Tensor:
    """Returns `Sight.edges` of rows of `length` tokens with these boundaries. Tokens behind the last boundary are a
    document too."""
    document = document_of(torch.arange(length, device=cu_seqlens.device), cu_seqlens)
    bounds = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), length)])
    return torch.stack([bounds[document], bounds[document + 1]])


def _bits_of_rows(
    query: Tensor, key: Tensor, variant: AttentionVariant, call: AttentionCall, by_query: bool, by_key: bool
) -> KeepBits | None:
    if call.dropout is None or not variant.dropout:
        return None
    index = call.dropout.tokens.index.view(query.shape[0], -1)  # [sq, b]
    assert query.shape[0] == key.shape[0] or call.key_start is not None
    first_key = index[0] if call.key_start is None else call.key_start
    heads = range(call.first_head, call.first_head + query.shape[2])
    draw = call.dropout.draw_attention(variant.dropout)
    return keep_bits_triton(draw, index, first_key, key.shape[0], heads, SeenKeys(*variant.reach), by_query, by_key)


def _bits_of_block(
    query: Tensor, key: Tensor, offsets: BlockOffsets, variant: AttentionVariant, call: BlockCall, by_key: bool
) -> KeepBits | None:
    if call.dropout is None or not variant.dropout:
        return None
    assert call.row_start is not None
    rows = torch.arange(offsets.query_start, offsets.query_start + query.shape[0], device=query.device)
    heads = range(call.first_head, call.first_head + query.shape[2])
    draw, seen = call.dropout.draw_attention(variant.dropout), SeenKeys(offsets.left, offsets.right)
    first_key = call.row_start + offsets.key_start
    index = rows[:, None] + call.row_start
    return keep_bits_triton(draw, index, first_key, key.shape[0], heads, seen, not by_key, by_key)
