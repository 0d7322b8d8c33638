"""Backward of our own flash attention: one kernel walks over the queries that see a tile of keys.

Gradients of keys and values stay in registers. Those of queries are added to float32 numbers in memory, in an order
that differs from run to run: from Hopper on by the engine that copies tiles, elsewhere by atomic additions. Only the
kernel with specialised warps can add in order, for deterministic mode.
"""

from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.attention.flash_forward_triton import (
    LOG2_E,
    Scores,
    Sight,
    TensorDescriptor,
    TileSize,
    aligned_heads,
    bias_strides,
    copies_tiles,
    factors,
    find_kept,
    find_seen,
    is_plain_on_hopper,
    load_bias,
    padded_width,
    row_length,
    shape_scores,
    switches,
    tiles_of_rows,
    words_of_head,
)
from megatron.core.ops.dropout.keep_bits_triton import KeepBits
from megatron.core.ops.gluon import gluon_kernel
from megatron.core.ops.tiles import cdiv

_ROWS = 64
"""Queries of a program of `_statistics_kernel`."""
_ROUNDED = 128
"""Statistics have entries for a multiple of this many queries."""


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    statistics, gradient, output, lse, queries, rounded, heads, width,
    gradient_row, gradient_batch, gradient_head, output_row, output_batch, output_head, per_unit, keep_share,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes `per_unit` times lse and `keep_share` times the product of output and its gradient, both with the opposite
    sign. A query without keys gets lse = inf, so its probabilities are 0."""
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    inside = (row < queries)[:, None] & (channel < width)[None, :]
    gradient += batch * gradient_batch + head * gradient_head
    output += batch * output_batch + head * output_head
    dy = tl.load(gradient + row[:, None].to(tl.int64) * gradient_row + channel[None, :], mask=inside, other=0.0)
    y = tl.load(output + row[:, None].to(tl.int64) * output_row + channel[None, :], mask=inside, other=0.0)
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1) * -keep_share
    sums = tl.load(lse + pair * queries + row, mask=row < queries, other=float("inf"))
    sums = tl.where(sums == float("-inf"), float("inf"), sums) * -per_unit
    at = statistics + (pair * rounded + row)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(at, tl.join(sums, delta), mask=(row < rounded)[:, None])


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    key_gradient, value_gradient, k, v, query_gradient, query_gradient_tiles, first_column, query_tiles, gradient_tiles,
    batch, head, query, gradient, statistics, bits, bias, bias_gradient, first, last, j, n, start, end, hides, place,
    slope, queries, keys, query_row, gradient_row, query_gradient_row, bias_row, bias_key, bias_gradient_row,
    bias_gradient_key, width, value_width, left, right, factor, cap, keep_scale,
    COMPARES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PACKED: tl.constexpr, HIDES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_BIAS: tl.constexpr, BIAS_LEARNS: tl.constexpr,
    DROPS: tl.constexpr, FULL: tl.constexpr, BULK: tl.constexpr,
    BULK_LOADS: tl.constexpr, BY_QUERY: tl.constexpr, FOLDS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds the gradients from the tiles of queries from `first` to `last`."""
    channel, value_channel = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    # Offsets within a tile fit into 32 bits, and stay the same from tile to tile.
    query_offset = tl.arange(0, M)[:, None] * query_row + channel[None, :]
    gradient_offset = tl.arange(0, M)[:, None] * gradient_row + value_channel[None, :]
    part_offset = tl.arange(0, M)[:, None] * query_gradient_row + channel[None, :]
    for m in tl.range(first, last, M):
        i = m + tl.arange(0, M)
        tile = tl.cast(m, tl.int64)
        query_at = query + tile * query_row + query_offset
        gradient_at = gradient + tile * gradient_row + gradient_offset
        if BULK_LOADS:
            q = query_tiles.load([batch, head, m, 0]).reshape(M, WIDTH)
            dy = gradient_tiles.load([batch, head, m, 0]).reshape(M, VALUE_WIDTH)
        elif FULL:
            q = tl.load(query_at)
            dy = tl.load(gradient_at)
        else:
            q = tl.load(query_at, mask=(i < queries)[:, None] & (channel < width)[None, :], other=0.0)
            dy = tl.load(gradient_at, mask=(i < queries)[:, None] & (value_channel < value_width)[None, :], other=0.0)
        sums, delta = tl.split(tl.load(statistics + m * 2 + tl.arange(0, M)[:, None] * 2 + tl.arange(0, 2)[None, :]))
        if BY_QUERY:  # what follows is [M, N]
            query_at_hand, key_at_hand, sums, delta = i[:, None], j[None, :], sums[:, None], delta[:, None]
            if not FOLDS:
                product = tl.dot(q, tl.trans(k), input_precision="ieee")
            else:
                product = tl.dot(q, tl.trans(k), tl.broadcast_to(sums, (M, N)), input_precision="ieee")
        else:  # [N, M]
            query_at_hand, key_at_hand, sums, delta = i[None, :], j[:, None], sums[None, :], delta[None, :]
            if not FOLDS:
                product = tl.dot(k, tl.trans(q), input_precision="ieee")
            else:
                product = tl.dot(k, tl.trans(q), tl.broadcast_to(sums, (N, M)), input_precision="ieee")
        share = product
        if HAS_CAP or HAS_SLOPES or HAS_BIAS:
            distance = key_at_hand - query_at_hand + place
            scores, share = shape_scores(product, distance, slope, factor, cap, HAS_CAP, HAS_SLOPES)
            if HAS_BIAS:
                scores += load_bias(bias, query_at_hand, key_at_hand, queries, keys, bias_row, bias_key)
            if not FOLDS:
                scores += sums
            weight = tl.exp2(scores)
        elif FOLDS:
            weight = tl.exp2(product * factor)
        else:
            weight = tl.exp2(product * factor + sums)
        if COMPARES:
            if BY_QUERY:
                first_query, query_end, hides_key = start[None, :], end[None, :], hides[None, :]
            else:
                first_query, query_end, hides_key = start[:, None], end[:, None], hides[:, None]
            seen = find_seen(
                query_at_hand, key_at_hand, keys, left, right, first_query, query_end, hides_key,
                HAS_LEFT, HAS_RIGHT, False, HIDES,
            )  # fmt: skip
            if PACKED:
                seen = seen & (first_query <= query_at_hand) & (query_at_hand < query_end)
            weight = tl.where(seen, weight, 0.0)
        if BY_QUERY:
            if DROPS or not FOLDS:
                weight_gradient = tl.dot(dy, tl.trans(v), input_precision="ieee")
            else:
                weight_gradient = tl.dot(dy, tl.trans(v), tl.broadcast_to(delta, (M, N)), input_precision="ieee")
        else:
            if DROPS or not FOLDS:
                weight_gradient = tl.dot(v, tl.trans(dy), input_precision="ieee")
            else:
                weight_gradient = tl.dot(v, tl.trans(dy), tl.broadcast_to(delta, (N, M)), input_precision="ieee")
        kept_weight = weight
        if DROPS:
            kept = find_kept(bits, m, n, queries, M, N, BY_QUERY)
            kept_weight = tl.where(kept, weight, keep_scale - keep_scale)  # see flash_forward_triton
            score_gradient = kept_weight * weight_gradient + weight * delta
        elif FOLDS:
            score_gradient = weight * weight_gradient
        else:
            score_gradient = weight * (weight_gradient + delta)
        if BIAS_LEARNS:
            bias_at = bias_gradient + query_at_hand.to(tl.int64) * bias_gradient_row + key_at_hand * bias_gradient_key
            tl.atomic_add(bias_at, score_gradient, mask=(query_at_hand < queries) & (key_at_hand < keys), sem="relaxed")
        if HAS_CAP:
            score_gradient *= 1.0 - share * share
        kept_weight, score_gradient = kept_weight.to(dy.dtype), score_gradient.to(q.dtype)
        if BY_QUERY:
            value_gradient = tl.dot(tl.trans(kept_weight), dy, value_gradient, input_precision="ieee")
            part = tl.dot(score_gradient, k, input_precision="ieee")  # [M, WIDTH]
            key_gradient = tl.dot(tl.trans(score_gradient), q, key_gradient, input_precision="ieee")
        else:
            value_gradient = tl.dot(kept_weight, dy, value_gradient, input_precision="ieee")
            key_gradient = tl.dot(score_gradient, q, key_gradient, input_precision="ieee")
            part = tl.dot(tl.trans(score_gradient), k, input_precision="ieee")
        part_at = query_gradient + tile * query_gradient_row + part_offset
        if BULK:
            query_gradient_tiles.atomic_add([m, first_column], part)
        elif FULL:
            tl.atomic_add(part_at, part, sem="relaxed")
        else:
            tl.atomic_add(part_at, part, mask=(i < queries)[:, None] & (channel < width)[None, :], sem="relaxed")
    return key_gradient, value_gradient


@triton.jit(do_not_specialize=["query_start", "key_start", "left", "right"])
def _backward_kernel(  # type: ignore[no-untyped-def]
    query_gradient, query_gradient_tiles, query_tiles, gradient_tiles, key_gradient, value_gradient, bias_gradient,
    gradient, query, key, value, statistics, bits, slopes, bias, edges, hidden, order, queries, rounded, keys, heads,
    shared, row_length, query_start, key_start, left, right, width, value_width,
    query_row, query_batch, query_head, key_row, key_batch, key_head, value_row, value_batch, value_head,
    gradient_row, gradient_batch, gradient_head,
    query_gradient_row, query_gradient_batch, query_gradient_head,
    key_gradient_row, key_gradient_batch, key_gradient_head,
    value_gradient_row, value_gradient_batch, value_gradient_head, bias_batch, bias_head, bias_row, bias_key,
    bias_gradient_batch, bias_gradient_head, bias_gradient_row, bias_gradient_key, scale, factor, cap, keep_scale,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PACKED: tl.constexpr, HIDES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_BIAS: tl.constexpr, BIAS_LEARNS: tl.constexpr, DROPS: tl.constexpr,
    FULL: tl.constexpr, BULK: tl.constexpr, BULK_LOADS: tl.constexpr, BY_QUERY: tl.constexpr, FOLDS: tl.constexpr,
    HEADS_FIRST: tl.constexpr, ORDERED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    groups = heads // shared
    if HEADS_FIRST:
        pair_of_groups, tile = tl.program_id(0), tl.program_id(1)
    else:
        pair_of_groups, tile = tl.program_id(1), tl.program_id(0)
    if ORDERED:
        tile = tl.load(order + tile)
    batch, group = (pair_of_groups // groups).to(tl.int64), (pair_of_groups % groups).to(tl.int64)
    n = tile * N
    j = n + tl.arange(0, N)
    behind = tl.minimum(n + N, keys)
    channel, value_channel = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    inside = (j < keys)[:, None] & (channel < width)[None, :]
    value_inside = (j < keys)[:, None] & (value_channel < value_width)[None, :]
    key += batch * key_batch + group * key_head
    value += batch * value_batch + group * value_head
    k = tl.load(key + j[:, None].to(tl.int64) * key_row + channel[None, :], mask=inside, other=0.0)
    v = tl.load(value + j[:, None].to(tl.int64) * value_row + value_channel[None, :], mask=value_inside, other=0.0)
    # Tiles first ... last hold all queries that see these keys; in whole ... whole_end all queries see all keys.
    first, last, whole, whole_end = 0, queries, 0, (queries + M - 1) // M * M
    start, end, hides = j, j, j
    if HAS_RIGHT:
        first = tl.maximum(0, n - right)
        whole = (tl.maximum(0, n + N - 1 - right) + M - 1) // M * M
    if HAS_LEFT:
        last = tl.minimum(last, behind + left)
        whole_end = tl.minimum(whole_end, tl.maximum(n + left + 1, 0) // M * M)
    if PACKED:
        start = tl.load(edges + key_start + j, mask=j < keys, other=0) - query_start
        end = tl.load(edges + row_length + key_start + j, mask=j < keys, other=0) - query_start
        first_start = tl.load(edges + key_start + n) - query_start
        last_start = tl.load(edges + key_start + behind - 1) - query_start
        last_end = tl.load(edges + row_length + key_start + behind - 1) - query_start
        first, last = tl.maximum(first, first_start), tl.minimum(last, last_end)
        whole = tl.maximum(whole, (tl.maximum(first_start, 0) + M - 1) // M * M)
        whole_end = tl.where(first_start == last_start, tl.minimum(whole_end, tl.maximum(last_end, 0) // M * M), 0)
    if HIDES:
        hides = tl.load(hidden + batch * keys + j, mask=j < keys, other=1)
        whole_end = 0
    whole_end = tl.where(n + N <= keys, whole_end, 0)
    first = first // M * M
    none = whole_end <= whole
    whole, whole_end = tl.where(none, last, whole), tl.where(none, last, whole_end)
    key_total = tl.zeros((N, WIDTH), tl.float32)
    value_total = tl.zeros((N, VALUE_WIDTH), tl.float32)
    place = key_start - query_start
    for number in range(shared):
        head = group * shared + number
        pair = batch * heads + head
        slope, bits_at, bias_at, bias_part_at = 0.0, bits, bias, bias_gradient
        if HAS_SLOPES:
            slope = tl.load(slopes + head)
        if HAS_BIAS:
            bias_at = bias + batch * bias_batch + head * bias_head
        if BIAS_LEARNS:
            bias_part_at = bias_gradient + batch * bias_gradient_batch + head * bias_gradient_head
        if DROPS:
            bits_at = bits + pair * words_of_head(queries, keys)
        query_at = query + batch * query_batch + head * query_head
        gradient_at = gradient + batch * gradient_batch + head * gradient_head
        batch_index, head_index = batch.to(tl.int32), head.to(tl.int32)
        first_column = ((batch * heads + head) * WIDTH).to(tl.int32)
        part_at = query_gradient + batch * query_gradient_batch + head * query_gradient_head
        statistics_at = statistics + pair * rounded * 2
        key_total, value_total = _walk(
            key_total, value_total, k, v, part_at, query_gradient_tiles, first_column, query_tiles, gradient_tiles,
            batch_index, head_index, query_at, gradient_at, statistics_at, bits_at, bias_at, bias_part_at,
            first, whole, j, n, start, end, hides, place, slope, queries, keys, query_row, gradient_row,
            query_gradient_row, bias_row, bias_key, bias_gradient_row, bias_gradient_key, width, value_width,
            left, right, factor, cap, keep_scale,
            True, HAS_LEFT, HAS_RIGHT, PACKED, HIDES, HAS_CAP, HAS_SLOPES, HAS_BIAS, BIAS_LEARNS, DROPS, FULL,
            BULK, BULK_LOADS, BY_QUERY, FOLDS, M, N, WIDTH, VALUE_WIDTH,
        )  # fmt: skip
        key_total, value_total = _walk(
            key_total, value_total, k, v, part_at, query_gradient_tiles, first_column, query_tiles, gradient_tiles,
            batch_index, head_index, query_at, gradient_at, statistics_at, bits_at, bias_at, bias_part_at,
            whole, whole_end, j, n, start, end, hides, place, slope, queries, keys, query_row, gradient_row,
            query_gradient_row, bias_row, bias_key, bias_gradient_row, bias_gradient_key, width, value_width,
            left, right, factor, cap, keep_scale,
            False, HAS_LEFT, HAS_RIGHT, PACKED, HIDES, HAS_CAP, HAS_SLOPES, HAS_BIAS, BIAS_LEARNS, DROPS, FULL,
            BULK, BULK_LOADS, BY_QUERY, FOLDS, M, N, WIDTH, VALUE_WIDTH,
        )  # fmt: skip
        if HAS_LEFT or PACKED:
            key_total, value_total = _walk(
                key_total, value_total, k, v, part_at, query_gradient_tiles, first_column, query_tiles, gradient_tiles,
                batch_index, head_index, query_at, gradient_at, statistics_at, bits_at, bias_at, bias_part_at,
                whole_end, last, j, n, start, end, hides, place, slope, queries, keys, query_row, gradient_row,
                query_gradient_row, bias_row, bias_key, bias_gradient_row, bias_gradient_key, width, value_width,
                left, right, factor, cap, keep_scale,
                True, HAS_LEFT, HAS_RIGHT, PACKED, HIDES, HAS_CAP, HAS_SLOPES, HAS_BIAS, BIAS_LEARNS, DROPS, FULL,
                BULK, BULK_LOADS, BY_QUERY, FOLDS, M, N, WIDTH, VALUE_WIDTH,
            )  # fmt: skip
    key_gradient += batch * key_gradient_batch + group * key_gradient_head
    value_gradient += batch * value_gradient_batch + group * value_gradient_head
    at = key_gradient + j[:, None].to(tl.int64) * key_gradient_row + channel[None, :]
    tl.store(at, (key_total * scale).to(key_gradient.dtype.element_ty), mask=inside)
    at = value_gradient + j[:, None].to(tl.int64) * value_gradient_row + value_channel[None, :]
    tl.store(at, (value_total * keep_scale).to(value_gradient.dtype.element_ty), mask=value_inside)


def _specialized(query: Tensor, key: Tensor, value: Tensor, scores: Scores, sight: Sight) -> ModuleType | None:
    """Returns the kernel with specialised warps, if it can compute a call."""
    kernel = gluon_kernel("attention.flash_backward_specialized_triton")
    return kernel if kernel is not None and is_plain_on_hopper(query, key, value, scores, sight) else None


def reads_bits_by_key(query: Tensor, key: Tensor, value: Tensor, scores: Scores, sight: Sight) -> bool:
    """Returns whether the backward of a call reads `KeepBits.by_key`, instead of `by_query`."""
    return _specialized(query, key, value, scores, sight) is not None


def flash_backward_triton(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scores: Scores,
    sight: Sight,
    bits: KeepBits | None,
    probability: float,
    tile: TileSize,
    query_type: torch.dtype,
    bias_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of query (in `query_type`), key and value, and the products of output and its gradient [b,
    a, sq]. Widths of heads are multiples of `VECTOR`. `output` and `lse` may cover more keys than `key`; see
    `blocks.block_attention_backward`. `bits` may have one order: see `reads_bits_by_key`.

    Adds the gradient of `scores.bias`, without dropout's factor 1 / (1 - probability), to `bias_gradient`: float32 [b,
    a, sq, sk], with stride 0 where it repeats.
    """
    gradient, query, key, value, output = (aligned_heads(heads) for heads in (gradient, query, key, value, output))
    sq, b, a, width = query.shape
    sk, _, groups, value_width = value.shape
    rounded = cdiv(sq, _ROUNDED) * _ROUNDED
    padded = padded_width(width), padded_width(value_width)
    full = padded == (width, value_width) and sq % tile.queries == 0
    keep_scale = 1.0 if bits is None else 1.0 / (1.0 - probability)
    specialized = _specialized(query, key, value, scores, sight)
    folds = tile.folds and bits is None and scores.cap is None and specialized is None
    statistics = query.new_empty(b, a, rounded, 2, dtype=torch.float32)
    _statistics_kernel[(rounded // _ROWS, b * a)](
        statistics, gradient, output, lse.contiguous(), sq, rounded, a, value_width,
        *gradient.stride()[:3], *output.stride()[:3], 1.0 / scores.scale if folds else LOG2_E, 1.0 / keep_scale,
        ROWS=_ROWS, WIDTH=padded[1],
    )  # fmt: skip
    if specialized is not None:
        size = specialized.TILE_KEYS
        gradients = specialized.backward_specialized(
            gradient, query, key, value, statistics, scores.scale, sight,
            _longest_first(sight, cdiv(sk, size), size, sk), query_type,
            None if bits is None else bits.by_key, keep_scale,
        )  # fmt: skip
        return *gradients, statistics[:, :, :sq, 1] * -keep_scale
    assert not (torch.are_deterministic_algorithms_enabled() and query.is_cuda), "kernels.OwnFlash refuses this call"
    by_query = None if bits is None else bits.by_query
    copies = copies_tiles(query.device)
    bulk = copies and query.is_cuda  # Triton's interpreter copies tiles but adds none
    total = query.new_zeros(sq, b, a, padded[0] if bulk else width, dtype=torch.float32)
    query_gradient = total[..., :width]
    tiles = TensorDescriptor.from_tensor(total.view(sq, -1), [tile.queries, padded[0]]) if bulk else None
    bulk_loads = tile.bulk_loads and full and copies
    query_tiles = tiles_of_rows(query, tile.queries) if bulk_loads else None
    gradient_tiles = tiles_of_rows(gradient, tile.queries) if bulk_loads else None
    bulk_loads = query_tiles is not None and gradient_tiles is not None
    key_gradient, value_gradient = key.new_empty(sk, b, groups, width), value.new_empty(value.shape)
    num_tiles = cdiv(sk, tile.keys)
    order = _longest_first(sight, num_tiles, tile.keys, sk) if tile.heads_first else None
    _backward_kernel[(b * groups, num_tiles) if tile.heads_first else (num_tiles, b * groups)](
        query_gradient, tiles, query_tiles, gradient_tiles, key_gradient, value_gradient, bias_gradient,
        gradient, query, key, value, statistics, by_query, scores.slopes, scores.bias, sight.edges, sight.hidden, order,
        sq, rounded, sk, a, a // groups, row_length(sight), sight.query_start, sight.key_start,
        sight.left or 0, sight.right or 0, width, value_width,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *gradient.stride()[:3],
        *query_gradient.stride()[:3], *key_gradient.stride()[:3], *value_gradient.stride()[:3],
        *bias_strides(scores.bias), *bias_strides(bias_gradient),
        scores.scale * keep_scale, *factors(scores), keep_scale,
        **switches(scores, sight), DROPS=bits is not None, BIAS_LEARNS=bias_gradient is not None, FULL=full, BULK=bulk,
        BULK_LOADS=bulk_loads, BY_QUERY=tile.by_query, FOLDS=folds, HEADS_FIRST=tile.heads_first,
        ORDERED=order is not None, M=tile.queries, N=tile.keys, WIDTH=padded[0], VALUE_WIDTH=padded[1],
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    query_gradient = torch.mul(
        query_gradient, scores.scale * keep_scale, out=torch.empty_like(query_gradient, dtype=query_type)
    )
    return query_gradient, key_gradient, value_gradient, statistics[:, :, :sq, 1] * -keep_scale


def _longest_first(sight: Sight, num_tiles: int, size: int, keys: int) -> Tensor | None:
    """Returns the tiles of keys of packed documents in the order in which programs should start: those seen by most
    queries first, because the last ones to start should be short. None: the order of the row."""
    if sight.edges is None:
        return None
    first = torch.arange(num_tiles, device=sight.edges.device) * size
    last = (first + size - 1).clamp(max=keys - 1)
    first, last = first + sight.key_start, last + sight.key_start
    queries = sight.edges[1, last] - (first if sight.right == 0 else sight.edges[0, first])
    return queries.argsort(descending=True).to(torch.int32)
