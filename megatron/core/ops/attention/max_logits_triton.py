"""The largest attention logit of each head on a GPU, in one kernel that keeps no scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.attention.flash_forward_triton import (
    TileSize,
    aligned_heads,
    find_seen,
    padded_heads,
    padded_width,
)
from megatron.core.ops.attention.flash_triton import edges_of_documents
from megatron.core.ops.attention.max_logits import max_attention_logits
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.ops.tiles import cdiv

_TILES = {128: TileSize(128, 128, 8, 3), 512: TileSize(64, 64, 4, 2)}
"""Tiles for heads of at most so many 16-bit channels."""


@triton.jit
def _walk(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    top, q, key, hidden, first, last, position, start, end, keys, key_row, width, left, right,
    COMPARES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PACKED: tl.constexpr, HIDES: tl.constexpr,
    FULL: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Returns the larger of `top` and the products of a tile of queries with the tiles of keys from `first` to
    `last`. NaN stays NaN."""
    channel = tl.arange(0, WIDTH)
    offset = tl.arange(0, N)[:, None] * key_row + channel[None, :]
    for n in tl.range(first, last, N):
        j = n + tl.arange(0, N)
        at = key + tl.cast(n, tl.int64) * key_row + offset
        if COMPARES or not FULL:
            k = tl.load(at, mask=(j < keys)[:, None] & (channel < width)[None, :], other=0.0)
        else:
            k = tl.load(at)
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        if COMPARES:
            hides = j
            if HIDES:
                hides = tl.load(hidden + j, mask=j < keys, other=1)
            seen = find_seen(
                position[:, None], j[None, :], keys, left, right, start[:, None], end[:, None], hides[None, :],
                HAS_LEFT, HAS_RIGHT, PACKED, HIDES,
            )  # fmt: skip
            product = tl.where(seen, product, float("-inf"))
        top = tl.maximum(top, product, propagate_nan=tl.PropagateNan.ALL)
    return top


@triton.jit(do_not_specialize=["longer", "left", "right"])
def _max_logits_kernel(  # type: ignore[no-untyped-def]
    output, query, key, positions, edges, hidden, queries, keys, heads, shared, longer, left, right, width,
    query_row, query_batch, query_head, key_row, key_batch, key_head, position_batch,
    HAS_POSITIONS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PACKED: tl.constexpr,
    HIDES: tl.constexpr, FULL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of a causal mask come first
    i = tile * M + tl.arange(0, M)
    valid = i < queries
    channel = tl.arange(0, WIDTH)
    query += batch * query_batch + head * query_head
    key += batch * key_batch + head // shared * key_head
    if HIDES:
        hidden += batch * keys
    q = tl.load(
        query + i[:, None].to(tl.int64) * query_row + channel[None, :],
        mask=valid[:, None] & (channel < width)[None, :], other=0.0,
    )  # fmt: skip
    position = i + longer
    if HAS_POSITIONS:
        position = tl.load(positions + batch * position_batch + i, mask=valid, other=0)
    earliest, latest = tl.min(tl.where(valid, position, keys), 0), tl.max(tl.where(valid, position, 0), 0)
    start, end = i, i
    # Tiles first ... last hold all keys that these queries see; in whole ... whole_end all queries see all keys.
    first, last, whole, whole_end = 0, keys, 0, keys // N * N
    if HAS_RIGHT:
        last = tl.minimum(last, tl.maximum(latest + right + 1, 0))
        whole_end = tl.minimum(whole_end, tl.maximum(earliest + right + 1, 0) // N * N)
    if HAS_LEFT:
        first = tl.maximum(0, earliest - left) // N * N
        whole = (tl.maximum(0, latest - left) + N - 1) // N * N
    if PACKED:
        start = tl.load(edges + position, mask=valid & (position < keys), other=0)
        end = tl.load(edges + keys + position, mask=valid & (position < keys), other=0)
        first = tl.maximum(first, tl.min(tl.where(valid, start, keys), 0) // N * N)
        last = tl.minimum(last, tl.max(end, 0))
    if PACKED or HIDES:
        whole_end = 0
    none = whole_end <= whole
    whole, whole_end = tl.where(none, first, whole), tl.where(none, first, whole_end)
    top = tl.full((M, N), float("-inf"), tl.float32)
    if HAS_LEFT:
        top = _walk(
            top, q, key, hidden, first, whole, position, start, end, keys, key_row, width, left, right,
            True, HAS_LEFT, HAS_RIGHT, PACKED, HIDES, FULL, N, WIDTH,
        )  # fmt: skip
    if not PACKED and not HIDES:
        top = _walk(
            top, q, key, hidden, whole, whole_end, position, start, end, keys, key_row, width, left, right,
            False, HAS_LEFT, HAS_RIGHT, PACKED, HIDES, FULL, N, WIDTH,
        )  # fmt: skip
    top = _walk(
        top, q, key, hidden, whole_end, last, position, start, end, keys, key_row, width, left, right,
        True, HAS_LEFT, HAS_RIGHT, PACKED, HIDES, FULL, N, WIDTH,
    )  # fmt: skip
    top = tl.where(valid[:, None], top, float("-inf"))
    is_nan = tl.max(tl.max((top != top).to(tl.int32), 1), 0)
    largest = tl.max(tl.max(tl.where(top != top, float("-inf"), top), 1), 0)
    tl.store(output + pair * tl.num_programs(0) + tile, tl.where(is_nan > 0, float("nan"), largest))


@torch.no_grad()
def max_attention_logits_triton(query: Tensor, key: Tensor, variant: AttentionVariant, call: AttentionCall) -> Tensor:
    """Computes `max_logits.max_attention_logits` with products in float32. Float64, heads of more than 256 channels,
    masks that hide a key from some queries only, and scales that are not positive use the definition."""
    sq, b, a, width = query.shape
    sk, _, g, _ = key.shape
    own_mask = call.mask is not None and (call.mask.dim() != 4 or call.mask.shape[1:3] != (1, 1))
    if query.dtype is torch.float64 or width > 256 or own_mask or variant.scale <= 0.0:
        return max_attention_logits(query, key, variant, call)
    query, key = (aligned_heads(padded_heads(heads)) for heads in (query, key))
    width = query.shape[3]
    words = max(width, 65) * query.element_size() // 2  # float32 takes the small tile
    tile = next(_TILES[widest] for widest in sorted(_TILES) if words <= widest)
    positions = None if call.query_positions is None else call.query_positions.int().expand(b, sq).contiguous()
    edges = None if call.cu_seqlens is None else edges_of_documents(call.cu_seqlens, sk).int().contiguous()
    hidden = None if call.mask is None else call.mask.expand(b, 1, 1, sk)[:, 0, 0].to(torch.int8).contiguous()
    left, right = variant.reach
    padded = padded_width(width)
    largest = torch.empty(b, a, cdiv(sq, tile.queries), dtype=torch.float32, device=query.device)
    _max_logits_kernel[(largest.shape[2], b * a)](
        largest, query, key, positions, edges, hidden, sq, sk, a, a // g, sk - sq, left or 0, right or 0, width,
        *query.stride()[:3], *key.stride()[:3], sq,
        HAS_POSITIONS=positions is not None, HAS_LEFT=left is not None, HAS_RIGHT=right is not None,
        PACKED=edges is not None, HIDES=hidden is not None, FULL=padded == width,
        M=tile.queries, N=tile.keys, WIDTH=padded, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return largest.amax((0, 2)) * variant.scale
