"""Forward of flash attention (Dao 2023) by our own Triton kernel, with everything that `blocks.block_attention` knows.

A program computes a tile of queries of one head and walks over tiles of keys. Tiles in which every query sees every key
skip the comparisons of positions. The file also has what forward and backward share.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.dropout.keep_bits_triton import KeepBits, bit_of
from megatron.core.ops.gluon import gluon_kernel
from megatron.core.ops.tiles import cdiv, next_power_of_2

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None

LOG2_E = 1.4426950408889634
"""Factor from natural logarithms to those of base 2, in which the kernels compute."""
VECTOR = 16
"""The kernels take heads of a multiple of this many channels, whose strides are multiples of it too. So threads load
vectors. Channels loaded one by one are slow, and worse: ptxas of CUDA 12.8, which Triton 3.6 brings, compiled a product
with 16 such channels of values to code that takes their address from a register of an earlier loop."""


@dataclass(frozen=True)
class Sight:
    """Which keys queries see, and where queries and keys are in the row."""

    query_start: int
    key_start: int
    left: int | None
    right: int | None
    """Query i sees key j, both counted within the block, if i - left <= j <= i + right; None: no limit."""
    edges: Tensor | None = None
    """int32 [2, row length]: for each token of the row, the first token of its packed document and the first behind it;
    None: the row is one document."""
    hidden: Tensor | None = None
    """bool [b, sk]: keys that no query sees."""


@dataclass(frozen=True)
class Scores:
    """How scores follow from the products of queries and keys."""

    scale: float
    cap: float | None = None
    slopes: Tensor | None = None
    """float32 [a]: ALiBi's slope of each head."""
    bias: Tensor | None = None
    """[b, a, sq, sk]: added to the scores; any strides, 0 where it repeats."""


@dataclass(frozen=True)
class TileSize:
    """Queries and keys that a program computes at a time."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    bulk_loads: bool = False
    """The tiles that a program walks over are read by the engine that copies tiles, where the GPU has one."""
    by_query: bool = False
    """Backward: a row of a tile of scores is a query instead of a key."""
    folds: bool = False
    """Backward without dropout and cap: the accumulator of the product starts at the negated row statistics, instead of
    subtracting them from the scores."""
    heads_first: bool = False
    """Backward: the same tile of all heads comes before the next tile; of packed documents the longest come first."""


@triton.jit
def shape_scores(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    product, distance, slope, factor, cap, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Returns scores in units of log 2, and tanh of the products under a cap. Without cap `factor` includes 1 / log 2;
    with it, it is 2 scale / cap, and `cap` includes 1 / log 2."""
    share = product
    scores = product * factor
    if HAS_CAP:
        share = 1.0 - 2.0 / (tl.exp(scores) + 1.0)
        scores = share * cap
    if HAS_SLOPES:
        scores -= slope * tl.abs(distance).to(tl.float32)
    return scores, share


@triton.jit
def load_bias(bias, i, j, queries, keys, bias_row, bias_key):  # type: ignore[no-untyped-def]
    """Returns the bias of a tile of scores in units of log 2."""
    at = bias + i.to(tl.int64) * bias_row + j.to(tl.int64) * bias_key
    return tl.load(at, mask=(i < queries) & (j < keys), other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def find_seen(  # type: ignore[no-untyped-def]
    i, j, keys, left, right, start, end, hidden,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PACKED: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """Returns which queries i see which keys j. `start` and `end` limit the other side of the pair to a document."""
    seen = (j < keys) & (i >= 0)
    if HAS_RIGHT:
        seen = seen & (j - i <= right)
    if HAS_LEFT:
        seen = seen & (i - j <= left)
    if PACKED:
        seen = seen & (start <= j) & (j < end)
    if HIDES:
        seen = seen & (hidden == 0)
    return seen


@triton.jit
def words_of_head(queries, keys):  # type: ignore[no-untyped-def]
    """Returns the number of words of a head in `KeepBits`, int64: 2^31 for 2^18 queries and keys."""
    return tl.cast((queries + 127) // 128, tl.int64) * ((keys + 127) // 128) * 512


@triton.jit
def find_kept(  # type: ignore[no-untyped-def]
    bits, m, n, queries, M: tl.constexpr, N: tl.constexpr, BY_QUERY: tl.constexpr
):
    """Returns which pairs of the queries from m and the keys from n on dropout keeps, [M, N] or [N, M]. `bits` are
    `KeepBits.by_query` of a head."""
    rows = (queries + 127) // 128 * 128
    bits += (tl.cast(n // 128, tl.int64) * rows + m) * 4
    later = n % 128 // 16
    if BY_QUERY:
        words = tl.load(bits + tl.arange(0, M)[:, None] * 4 + tl.arange(0, 4)[None, :]) >> later
        words = tl.reshape(tl.broadcast_to(words[:, None, :, None], (M, N // 8, 4, 2)), (M, N))
        key = tl.arange(0, N)[None, :]
    else:
        words = tl.load(bits + tl.arange(0, 4)[:, None] + tl.arange(0, M)[None, :] * 4) >> later
        words = tl.reshape(tl.broadcast_to(words[None, :, None, :], (N // 8, 4, 2, M)), (N, M))
        key = tl.arange(0, N)[:, None]
    return (words & (1 << bit_of(key))) != 0


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    context, top, total, query, key_tiles, value_tiles, batch, group, key, value, bits, hidden, bias, first, last, m, i,
    start, end, place, slope, queries, keys,
    key_row, value_row, bias_row, bias_key, width, value_width, left, right, factor, cap, keep_scale,
    COMPARES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PACKED: tl.constexpr, HIDES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, FULL: tl.constexpr,
    BULK_LOADS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds the tiles of keys from `first` to `last` to the running softmax of a tile of queries."""
    channel, value_channel = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    # Offsets within a tile fit into 32 bits, and stay the same from tile to tile.
    key_offset = tl.arange(0, N)[:, None] * key_row + channel[None, :]
    value_offset = tl.arange(0, N)[:, None] * value_row + value_channel[None, :]
    for n in tl.range(first, last, N):
        j = n + tl.arange(0, N)
        key_at = key + tl.cast(n, tl.int64) * key_row + key_offset
        value_at = value + tl.cast(n, tl.int64) * value_row + value_offset
        if BULK_LOADS:
            k = key_tiles.load([batch, group, n, 0]).reshape(N, WIDTH)
        elif COMPARES or not FULL:
            k = tl.load(key_at, mask=(j < keys)[:, None] & (channel < width)[None, :], other=0.0)
        else:
            k = tl.load(key_at)
        product = tl.dot(query, tl.trans(k), input_precision="ieee")
        seen = i[:, None] >= 0
        if COMPARES:
            hides = j
            if HIDES:
                hides = tl.load(hidden + j, mask=j < keys, other=1)
            seen = find_seen(
                i[:, None], j[None, :], keys, left, right, start[:, None], end[:, None], hides[None, :],
                HAS_LEFT, HAS_RIGHT, PACKED, HIDES,
            )  # fmt: skip
        if HAS_CAP or HAS_SLOPES or HAS_BIAS:
            distance = j[None, :] - i[:, None] + place
            scores, _ = shape_scores(product, distance, slope, factor, cap, HAS_CAP, HAS_SLOPES)
            if HAS_BIAS:
                scores += load_bias(bias, i[:, None], j[None, :], queries, keys, bias_row, bias_key)
            if COMPARES:
                scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weight = tl.exp2(scores - higher[:, None])
        else:  # one multiply-add for each score
            if COMPARES:
                product = tl.where(seen, product, float("-inf"))
            higher = tl.maximum(top, tl.max(product, 1) * factor)
            weight = tl.exp2(product * factor - higher[:, None])
        rescale = tl.exp2(top - higher)
        total = total * rescale + tl.sum(weight, 1)
        context = context * rescale[:, None]
        top = higher
        if DROPS:
            kept = find_kept(bits, m, n, queries, M, N, True)
            # With a constant 0, LLVM selects after the rounding, among unpacked halves: twice the instructions.
            weight = tl.where(kept, weight, keep_scale - keep_scale)
        if BULK_LOADS:
            v = value_tiles.load([batch, group, n, 0]).reshape(N, VALUE_WIDTH)
        elif COMPARES or not FULL:
            v = tl.load(value_at, mask=(j < keys)[:, None] & (value_channel < value_width)[None, :], other=0.0)
        else:
            v = tl.load(value_at)
        context = tl.dot(weight.to(v.dtype), v, context, input_precision="ieee")
    return context, top, total


@triton.jit(do_not_specialize=["query_start", "key_start", "left", "right"])
def _forward_kernel(  # type: ignore[no-untyped-def]
    output, lse, query, key_tiles, value_tiles, key, value, bits, sink, slopes, bias, edges, hidden,
    queries, keys, heads, shared, row_length, query_start, key_start, left, right, width, value_width,
    query_row, query_batch, query_head, key_row, key_batch, key_head, value_row, value_batch, value_head,
    bias_batch, bias_head, bias_row, bias_key, output_row, output_batch, output_head, factor, cap, keep_scale,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PACKED: tl.constexpr, HIDES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINK: tl.constexpr, DROPS: tl.constexpr, FULL: tl.constexpr,
    BULK_LOADS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    m = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest rows of a causal mask come first
    i = m + tl.arange(0, M)
    behind = tl.minimum(m + M, queries)
    channel, value_channel = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    batch_index, group_index = batch.to(tl.int32), (head // shared).to(tl.int32)
    query += batch * query_batch + head * query_head
    key += batch * key_batch + head // shared * key_head
    value += batch * value_batch + head // shared * value_head
    if DROPS:
        bits += pair * words_of_head(queries, keys)
    if HIDES:
        hidden += batch * keys
    if HAS_BIAS:
        bias += batch * bias_batch + head * bias_head
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes + head)
    q = tl.load(
        query + i[:, None].to(tl.int64) * query_row + channel[None, :],
        mask=(i < queries)[:, None] & (channel < width)[None, :], other=0.0,
    )  # fmt: skip
    # Tiles first ... last hold all keys that these queries see; in whole ... whole_end all queries see all keys.
    first, last, whole, whole_end = 0, keys, 0, keys // N * N
    start, end = i, i
    if HAS_RIGHT:
        last = tl.minimum(last, behind + right)
        whole_end = tl.minimum(whole_end, tl.maximum(m + right + 1, 0) // N * N)
    if HAS_LEFT:
        first = tl.maximum(0, m - left)
        whole = (tl.maximum(0, m + M - 1 - left) + N - 1) // N * N
    if PACKED:
        start = tl.load(edges + query_start + i, mask=i < queries, other=0) - key_start
        end = tl.load(edges + row_length + query_start + i, mask=i < queries, other=0) - key_start
        first_start = tl.load(edges + query_start + m) - key_start
        last_start = tl.load(edges + query_start + behind - 1) - key_start
        last_end = tl.load(edges + row_length + query_start + behind - 1) - key_start
        first, last = tl.maximum(first, first_start), tl.minimum(last, last_end)
        whole = tl.maximum(whole, (tl.maximum(first_start, 0) + N - 1) // N * N)
        whole_end = tl.where(first_start == last_start, tl.minimum(whole_end, tl.maximum(last_end, 0) // N * N), 0)
    if HIDES:
        whole_end = 0
    first = first // N * N
    none = whole_end <= whole
    whole, whole_end = tl.where(none, first, whole), tl.where(none, first, whole_end)
    top = tl.full((M,), -1.0e30, tl.float32)  # finite, so that rows which see no key yet give no NaN
    total = tl.zeros((M,), tl.float32)
    context = tl.zeros((M, VALUE_WIDTH), tl.float32)
    place = key_start - query_start
    if HAS_LEFT or PACKED:
        context, top, total = _walk(
            context, top, total, q, key_tiles, value_tiles, batch_index, group_index, key, value, bits, hidden, bias,
            first, whole, m, i, start, end, place, slope, queries, keys, key_row, value_row, bias_row, bias_key,
            width, value_width, left, right, factor, cap, keep_scale,
            True, HAS_LEFT, HAS_RIGHT, PACKED, HIDES, HAS_CAP, HAS_SLOPES, HAS_BIAS, DROPS, FULL,
            BULK_LOADS, M, N, WIDTH, VALUE_WIDTH,
        )  # fmt: skip
    context, top, total = _walk(
        context, top, total, q, key_tiles, value_tiles, batch_index, group_index, key, value, bits, hidden, bias,
        whole, whole_end, m, i, start, end, place, slope, queries, keys, key_row, value_row, bias_row, bias_key,
        width, value_width, left, right, factor, cap, keep_scale,
        False, HAS_LEFT, HAS_RIGHT, PACKED, HIDES, HAS_CAP, HAS_SLOPES, HAS_BIAS, DROPS, FULL,
        BULK_LOADS, M, N, WIDTH, VALUE_WIDTH,
    )  # fmt: skip
    context, top, total = _walk(
        context, top, total, q, key_tiles, value_tiles, batch_index, group_index, key, value, bits, hidden, bias,
        whole_end, last, m, i, start, end, place, slope, queries, keys, key_row, value_row, bias_row, bias_key,
        width, value_width, left, right, factor, cap, keep_scale,
        True, HAS_LEFT, HAS_RIGHT, PACKED, HIDES, HAS_CAP, HAS_SLOPES, HAS_BIAS, DROPS, FULL,
        BULK_LOADS, M, N, WIDTH, VALUE_WIDTH,
    )  # fmt: skip
    if HAS_SINK:
        extra = tl.load(sink + head).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, extra)
        rescale = tl.exp2(top - higher)
        total = total * rescale + tl.exp2(extra - higher)
        context = context * rescale[:, None]
        top = higher
    known = tl.maximum(total, 1.0e-37)  # Triton makes constants below 2^-126 float64
    context *= (keep_scale / known)[:, None]
    sums = tl.where(total > 0.0, (top + tl.log2(known)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + pair * queries + i, sums, mask=i < queries)
    output += batch * output_batch + head * output_head
    tl.store(
        output + i[:, None].to(tl.int64) * output_row + value_channel[None, :], context.to(output.dtype.element_ty),
        mask=(i < queries)[:, None] & (value_channel < value_width)[None, :],
    )  # fmt: skip


def flash_forward_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    scores: Scores,
    sight: Sight,
    bits: KeepBits | None,
    probability: float,
    tile: TileSize,
) -> tuple[Tensor, Tensor]:
    """Returns output [sq, b, a, dv] and lse [b, a, sq] (float32, with the sink) of query [sq, b, a, d], key [sk, b, g,
    d] and value [sk, b, g, dv], where d and dv are multiples of `VECTOR`. Reads `bits.by_query`; None: nothing is
    dropped."""
    query, key, value = (aligned_heads(heads) for heads in (query, key, value))
    specialized = gluon_kernel("attention.flash_forward_specialized_triton")
    by_query = None if bits is None else bits.by_query
    keep_scale = 1.0 if bits is None else 1.0 / (1.0 - probability)
    if specialized is not None and specialized.takes(query, key, value, sink, scores, sight):
        return specialized.forward_specialized(query, key, value, scores.scale, sight, by_query, keep_scale)
    sq, b, a, width = query.shape
    sk, _, groups, value_width = value.shape
    output = query.new_empty(sq, b, a, value_width)
    lse = query.new_empty(b, a, sq, dtype=torch.float32)
    padded = padded_width(width), padded_width(value_width)
    full = padded == (width, value_width)
    bulk_loads = tile.bulk_loads and full and copies_tiles(query.device)
    key_tiles = tiles_of_rows(key, tile.keys) if bulk_loads else None
    value_tiles = tiles_of_rows(value, tile.keys) if bulk_loads else None
    bulk_loads = key_tiles is not None and value_tiles is not None
    _forward_kernel[(cdiv(sq, tile.queries), b * a)](
        output, lse, query, key_tiles, value_tiles, key, value, by_query, sink, scores.slopes, scores.bias, sight.edges,
        sight.hidden, sq, sk, a, a // groups, row_length(sight),
        sight.query_start, sight.key_start, sight.left or 0, sight.right or 0, width, value_width,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *bias_strides(scores.bias), *output.stride()[:3], *factors(scores),
        keep_scale,
        **switches(scores, sight), DROPS=bits is not None, HAS_SINK=sink is not None, FULL=full, BULK_LOADS=bulk_loads,
        M=tile.queries, N=tile.keys, WIDTH=padded[0], VALUE_WIDTH=padded[1],
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return output, lse


# ---------------------------------------------------------------------------------------------------------------------
# Arguments that forward and backward share


def aligned_heads(heads: Tensor) -> Tensor:
    """Returns heads [s, b, a, d], d a multiple of `VECTOR`, such that channels are neighbours in memory and each head
    begins at a multiple of `VECTOR` elements: the same tensor if it is so already, otherwise a copy."""
    aligned = all(stride % VECTOR == 0 for stride in heads.stride()[:3])
    if heads.stride(3) == 1 and aligned and heads.data_ptr() % 16 == 0:
        return heads
    return torch.empty_like(heads, memory_format=torch.contiguous_format).copy_(heads)


def padded_heads(heads: Tensor) -> Tensor:
    """Returns heads [s, b, a, d] with zeros as further channels, up to a multiple of `VECTOR`."""
    missing = -heads.shape[3] % VECTOR
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def copies_tiles(device: torch.device) -> bool:
    """Returns whether the device has an engine that copies tiles and adds them in memory (Hopper's TMA)."""
    return TensorDescriptor is not None and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def begin_at_16_bytes(heads: Tensor) -> bool:
    """Returns whether the engine that copies tiles can read heads [s, b, a, d]: none repeats another, and all begin at
    multiples of 16 bytes."""
    aligned = all(stride and stride * heads.element_size() % 16 == 0 for stride in heads.stride()[:3])
    return aligned and heads.data_ptr() % 16 == 0


def is_plain_on_hopper(query: Tensor, key: Tensor, value: Tensor, scores: Scores, sight: Sight) -> bool:
    """Returns whether a call has what the kernels with specialised warps need: a GPU of capability 9.0, half precision,
    heads of 64 or 128 channels, and nothing that changes scores."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device) == (9, 0)
        and query.shape[3] == value.shape[3]
        and query.shape[3] in (64, 128)
        and (scores.cap, scores.slopes, scores.bias, sight.hidden) == 4 * (None,)
        and query.numel() > 0
        and key.shape[0] > 0
    )


def tiles_of_rows(heads: Tensor, rows: int) -> Any:
    """Returns heads [s, b, a, d] as [b, a, s, d] in tiles [1, 1, rows, d] for the engine that copies tiles; None if it
    cannot read them."""
    if not begin_at_16_bytes(heads):
        return None
    return TensorDescriptor.from_tensor(heads.permute(1, 2, 0, 3), [1, 1, rows, heads.shape[3]])


def padded_width(width: int) -> int:
    """Returns the channels that a kernel computes for a head: a power of 2, and at least what a product needs."""
    return max(16, next_power_of_2(width))


def row_length(sight: Sight) -> int:
    """Returns the number of tokens in `sight.edges`."""
    return 0 if sight.edges is None else sight.edges.shape[1]


def bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    """Returns the strides of a bias [b, a, sq, sk]."""
    return (0, 0, 0, 0) if bias is None else bias.stride()


def factors(scores: Scores) -> tuple[float, float]:
    """Returns `factor` and `cap` of `shape_scores`."""
    if scores.cap is None:
        return scores.scale * LOG2_E, 0.0
    return 2.0 * scores.scale / scores.cap, scores.cap * LOG2_E


def switches(scores: Scores, sight: Sight) -> dict[str, bool]:
    """Returns what a compiled kernel computes."""
    return {
        "HAS_LEFT": sight.left is not None,
        "HAS_RIGHT": sight.right is not None,
        "PACKED": sight.edges is not None,
        "HIDES": sight.hidden is not None,
        "HAS_CAP": scores.cap is not None,
        "HAS_SLOPES": scores.slopes is not None,
        "HAS_BIAS": scores.bias is not None,
    }
