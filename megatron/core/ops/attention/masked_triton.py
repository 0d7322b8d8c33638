"""Attention with a mask of queries and keys on a GPU, such as that of sparse attention (DSA): forward and backward skip
tiles in which no query sees a key.

Queries and keys are cut into tiles of 64. For each tile of queries there is a list of the tiles of keys in which one of
them sees something, and the other way round. Programs walk over these lists, so the time of keys that nobody selects is
saved where 64 neighbours agree about them. No scores are kept. All sums have an order, so results are the same at every
run. Heads of d channels are computed as a power of two and the rest, such as 128 and 64 of latent attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.attention.flash_backward_triton import _ROWS, _statistics_kernel
from megatron.core.ops.attention.flash_forward_triton import LOG2_E, aligned_heads, padded_heads
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, hidden_keys
from megatron.core.ops.tiles import cdiv, next_power_of_2

TILE = 64
"""Queries and keys of a tile."""
_ROWS_AT_ONCE = 1024
"""Queries whose hidden keys are found at once: distances take 8 bytes a pair."""


@triton.jit
def _heads(base, row, stride, first, limit, width, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads channels `first` to `first` + CHANNELS of some rows of a head; 0 outside."""
    channel = first + tl.arange(0, CHANNELS)
    at = base + row[:, None].to(tl.int64) * stride + channel[None, :]
    return tl.load(at, mask=(row < limit)[:, None] & (channel < width)[None, :], other=0.0)


@triton.jit
def _store(base, row, stride, first, limit, width, values, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = first + tl.arange(0, CHANNELS)
    at = base + row[:, None].to(tl.int64) * stride + channel[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=(row < limit)[:, None] & (channel < width)[None, :])


@triton.jit
def _hidden(hidden, i, j, queries, keys):  # type: ignore[no-untyped-def]
    """Returns which queries do not see which keys, [queries, keys]."""
    inside = (i < queries)[:, None] & (j < keys)[None, :]
    return tl.load(hidden + i[:, None].to(tl.int64) * keys + j[None, :], mask=inside, other=1) != 0


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    output, lse, query, key, value, hidden, lists, counts, most, queries, keys, heads, shared, width, value_width,
    query_row, query_batch, query_head, key_row, key_batch, key_head, value_row, value_batch, value_head,
    output_row, output_batch, output_head, factor,
    TILE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    query += batch * query_batch + head * query_head
    key += batch * key_batch + head // shared * key_head
    value += batch * value_batch + head // shared * value_head
    hidden += batch * queries * keys
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    own = batch * tl.num_programs(0) + tl.program_id(0)
    q = _heads(query, i, query_row, 0, queries, width, FIRST)
    q_rest = q
    if REST:
        q_rest = _heads(query, i, query_row, FIRST, queries, width, REST)
    top = tl.full((TILE,), -1.0e30, tl.float32)  # finite, so that rows which see no key yet give no NaN
    total = tl.zeros((TILE,), tl.float32)
    context = tl.zeros((TILE, VALUES), tl.float32)
    for place in range(tl.load(counts + own)):
        j = tl.load(lists + own * most + place) * TILE + tl.arange(0, TILE) + 0
        k = _heads(key, j, key_row, 0, keys, width, FIRST)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            k_rest = _heads(key, j, key_row, FIRST, keys, width, REST)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = tl.where(_hidden(hidden, i, j, queries, keys), float("-inf"), scores * factor)
        higher = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(top - higher)
        total = total * rescale + tl.sum(weight, 1)
        v = _heads(value, j, value_row, 0, keys, value_width, VALUES)
        context = tl.dot(weight.to(v.dtype), v, context * rescale[:, None], input_precision="ieee")
        top = higher
    known = tl.maximum(total, 1.0e-37)
    sums = tl.where(total > 0.0, (top + tl.log2(known)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + pair * queries + i, sums, mask=i < queries)
    output += batch * output_batch + head * output_head
    _store(output, i, output_row, 0, queries, value_width, context / known[:, None], VALUES)


@triton.jit
def _query_gradient_kernel(  # type: ignore[no-untyped-def]
    query_gradient, gradient, query, key, value, statistics, hidden, lists, counts, most, queries, rounded, keys, heads,
    shared, width, value_width, query_row, query_batch, query_head, key_row, key_batch, key_head,
    value_row, value_batch, value_head, gradient_row, gradient_batch, gradient_head, own_row, own_batch, own_head,
    factor, scale, TILE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    query += batch * query_batch + head * query_head
    key += batch * key_batch + head // shared * key_head
    value += batch * value_batch + head // shared * value_head
    gradient += batch * gradient_batch + head * gradient_head
    hidden += batch * queries * keys
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    own = batch * tl.num_programs(0) + tl.program_id(0)
    q = _heads(query, i, query_row, 0, queries, width, FIRST)
    dy = _heads(gradient, i, gradient_row, 0, queries, value_width, VALUES)
    sums, delta = tl.split(tl.load(statistics + (pair * rounded + i)[:, None] * 2 + tl.arange(0, 2)[None, :]))
    found = tl.zeros((TILE, FIRST), tl.float32)
    q_rest, found_rest = q, found
    if REST:
        q_rest = _heads(query, i, query_row, FIRST, queries, width, REST)
        found_rest = tl.zeros((TILE, REST), tl.float32)
    for place in range(tl.load(counts + own)):
        j = tl.load(lists + own * most + place) * TILE + tl.arange(0, TILE) + 0
        k = _heads(key, j, key_row, 0, keys, width, FIRST)
        k_rest = k
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            k_rest = _heads(key, j, key_row, FIRST, keys, width, REST)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        weight = tl.exp2(scores * factor + sums[:, None])
        weight = tl.where(_hidden(hidden, i, j, queries, keys), 0.0, weight)
        v = _heads(value, j, value_row, 0, keys, value_width, VALUES)
        change = weight * (tl.dot(dy, tl.trans(v), input_precision="ieee") + delta[:, None])
        found = tl.dot(change.to(k.dtype), k, found, input_precision="ieee")
        if REST:
            found_rest = tl.dot(change.to(k.dtype), k_rest, found_rest, input_precision="ieee")
    query_gradient += batch * own_batch + head * own_head
    _store(query_gradient, i, own_row, 0, queries, width, found * scale, FIRST)
    if REST:
        _store(query_gradient, i, own_row, FIRST, queries, width, found_rest * scale, REST)


@triton.jit
def _key_gradient_kernel(  # type: ignore[no-untyped-def]
    key_gradient, value_gradient, gradient, query, key, value, statistics, hidden, lists, counts, most, queries,
    rounded, keys, heads, shared, width, value_width, query_row, query_batch, query_head, key_row, key_batch, key_head,
    value_row, value_batch, value_head, gradient_row, gradient_batch, gradient_head, own_row, own_batch, own_head,
    own_value_row, own_value_batch, own_value_head, factor, scale,
    TILE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    groups = heads // shared
    batch, group = (tl.program_id(1) // groups).to(tl.int64), tl.program_id(1) % groups
    key += batch * key_batch + group * key_head
    value += batch * value_batch + group * value_head
    hidden += batch * queries * keys
    j = tl.program_id(0) * TILE + tl.arange(0, TILE)
    own = batch * tl.num_programs(0) + tl.program_id(0)
    k = _heads(key, j, key_row, 0, keys, width, FIRST)
    v = _heads(value, j, value_row, 0, keys, value_width, VALUES)
    found, of_values = tl.zeros((TILE, FIRST), tl.float32), tl.zeros((TILE, VALUES), tl.float32)
    k_rest, found_rest = k, found
    if REST:
        k_rest = _heads(key, j, key_row, FIRST, keys, width, REST)
        found_rest = tl.zeros((TILE, REST), tl.float32)
    length = tl.load(counts + own)
    for step in range(length * shared):  # all queries of a head, then those of the next
        head = group * shared + step // length
        i = tl.load(lists + own * most + step % length) * TILE + tl.arange(0, TILE)
        at = query + batch * query_batch + head * query_head
        q = _heads(at, i, query_row, 0, queries, width, FIRST)
        q_rest = q
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            q_rest = _heads(at, i, query_row, FIRST, queries, width, REST)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        pair = (batch * heads + head) * rounded
        sums, delta = tl.split(tl.load(statistics + (pair + i)[:, None] * 2 + tl.arange(0, 2)[None, :]))
        weight = tl.exp2(scores * factor + sums[:, None])
        weight = tl.where(_hidden(hidden, i, j, queries, keys), 0.0, weight)
        dy_at = gradient + batch * gradient_batch + head * gradient_head
        dy = _heads(dy_at, i, gradient_row, 0, queries, value_width, VALUES)
        of_values = tl.dot(tl.trans(weight.to(dy.dtype)), dy, of_values, input_precision="ieee")
        change = weight * (tl.dot(dy, tl.trans(v), input_precision="ieee") + delta[:, None])
        change = tl.trans(change.to(q.dtype))
        found = tl.dot(change, q, found, input_precision="ieee")
        if REST:
            found_rest = tl.dot(change, q_rest, found_rest, input_precision="ieee")
    key_gradient += batch * own_batch + group * own_head
    _store(key_gradient, j, own_row, 0, keys, width, found * scale, FIRST)
    if REST:
        _store(key_gradient, j, own_row, FIRST, keys, width, found_rest * scale, REST)
    value_gradient += batch * own_value_batch + group * own_value_head
    _store(value_gradient, j, own_value_row, 0, keys, value_width, of_values, VALUES)


@dataclass(frozen=True)
class _Lists:
    """For each tile the tiles of the other side that it has to do with, int32 [b, tiles, other tiles], and their
    number, [b, tiles]."""

    tiles: Tensor
    counts: Tensor

    @classmethod
    def of(cls, seen: Tensor) -> "_Lists":
        """Returns the lists for bool [b, tiles, other tiles]."""
        order = (~seen).to(torch.uint8).argsort(dim=-1, stable=True)
        return cls(order.to(torch.int32).contiguous(), seen.sum(-1).to(torch.int32))


def masked_attention_triton(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall
) -> Tensor:
    """Computes `unfused.attention` with a mask that is equal for all heads, without dropout, sink, caps and biases. A
    query that sees no key gets zeros."""
    value_width, hidden = value.shape[3], _hidden_of(query, key, variant, call)
    query, key, value = (padded_heads(heads) for heads in (query, key, value))
    output: Tensor = _MaskedAttention.apply(query, key, value, hidden, variant.scale)
    return output[..., :value_width]


def _hidden_of(query: Tensor, key: Tensor, variant: AttentionVariant, call: AttentionCall) -> Tensor:
    """Returns which keys each query does not see, uint8 [b, sq, sk]."""
    sq, sk, batch = query.shape[0], key.shape[0], query.shape[1]
    found = torch.empty(batch, sq, sk, dtype=torch.uint8, device=query.device)
    for first in range(0, sq, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, sq - first)
        hidden = hidden_keys(variant, call, first, rows, sq, sk, query.device)
        assert hidden is not None and (hidden.dim() < 4 or hidden.shape[1] == 1)
        found[:, first : first + rows] = hidden.squeeze(1) if hidden.dim() == 4 else hidden
    return found


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
        query, key, value = (aligned_heads(heads) for heads in (query, key, value))
        sq, b, a, _ = query.shape
        sk, _, groups, value_width = value.shape
        missing = (0, -sk % TILE, 0, -sq % TILE)
        tiles = torch.nn.functional.pad(hidden, missing, value=1).unflatten(1, (-1, TILE)).unflatten(3, (-1, TILE))
        seen = (tiles == 0).any(4).any(2)
        lists = _Lists.of(seen)
        output, lse = query.new_empty(sq, b, a, value_width), query.new_empty(b, a, sq, dtype=torch.float32)
        _forward_kernel[(cdiv(sq, TILE), b * a)](
            output, lse, query, key, value, hidden, lists.tiles, lists.counts, seen.shape[2], sq, sk, a, a // groups,
            query.shape[3], value_width, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            *output.stride()[:3], scale * LOG2_E, TILE=TILE, **_channels(query, value), num_warps=4, num_stages=2,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, hidden, seen, output, lse)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, hidden, seen, output, lse = ctx.saved_tensors
        gradient = aligned_heads(gradient)
        sq, b, a, width = query.shape
        sk, _, groups, value_width = value.shape
        rounded = cdiv(sq, TILE) * TILE
        statistics = query.new_empty(b, a, rounded, 2, dtype=torch.float32)
        _statistics_kernel[(cdiv(rounded, _ROWS), b * a)](
            statistics, gradient, output, lse, sq, rounded, a, value_width, *gradient.stride()[:3],
            *output.stride()[:3], LOG2_E, 1.0, ROWS=_ROWS, WIDTH=max(16, next_power_of_2(value_width)),
        )  # fmt: skip
        gradients = [torch.empty_like(heads, memory_format=torch.contiguous_format) for heads in (query, key, value)]
        sizes = sq, rounded, sk, a, a // groups, width, value_width
        strides = [stride for heads in (query, key, value, gradient) for stride in heads.stride()[:3]]
        settings = {"TILE": TILE, **_channels(query, value), "num_warps": 8, "num_stages": 2}
        of_queries, of_keys = _Lists.of(seen), _Lists.of(seen.transpose(1, 2))
        _query_gradient_kernel[(cdiv(sq, TILE), b * a)](
            gradients[0], gradient, query, key, value, statistics, hidden, of_queries.tiles, of_queries.counts,
            seen.shape[2], *sizes, *strides, *gradients[0].stride()[:3], ctx.scale * LOG2_E, ctx.scale, **settings,
        )  # fmt: skip
        _key_gradient_kernel[(cdiv(sk, TILE), b * groups)](
            gradients[1], gradients[2], gradient, query, key, value, statistics, hidden, of_keys.tiles, of_keys.counts,
            seen.shape[1], *sizes, *strides, *gradients[1].stride()[:3], *gradients[2].stride()[:3],
            ctx.scale * LOG2_E, ctx.scale, **settings,
        )  # fmt: skip
        return *gradients, None, None


def _channels(query: Tensor, value: Tensor) -> dict[str, int]:
    """Returns how many channels the kernels compute: of keys a power of two and those behind it, and of values."""
    width = query.shape[3]
    first = max(16, 1 << (width.bit_length() - 1))
    rest = max(16, next_power_of_2(width - first)) if width > first else 0
    return {"FIRST": first, "REST": rest, "VALUES": max(16, next_power_of_2(value.shape[3]))}
