"""Dropout masks of attention probabilities on a GPU, one bit for each pair of a query and a key.

An attention kernel that drew its own masks would draw each mask two or three times. Here the bits are drawn once, at
the speed of integer arithmetic, and read in forward and backward.

There are two orders of the bits, because a row of scores is a query in some kernels and a key in others. In both, a
word has every fourth pair of the 128 columns of a row. A thread of a matrix product has the scores of these columns in
its registers, so that it reads no bits of other threads.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.dropout.dropout import Draw
from megatron.core.ops.tiles import cdiv

BLOCK = tl.constexpr(128)
"""Queries, and keys, of a block of bits."""
_BLOCKS = 8
"""Most blocks of keys that a program draws."""


@dataclass(frozen=True)
class SeenKeys:
    """Which keys queries see. The bits of other pairs are left undefined."""

    left: int | None
    """Query i sees key j if j >= i - left; None: no limit."""
    right: int | None
    """Query i sees key j only if also j <= i + right; None: no limit."""


@dataclass(frozen=True)
class KeepBits:
    """Which pairs of queries and keys are kept. Numbers of queries and keys are rounded up to blocks of 128.

    A block has four words. Word w has the bits of the places p with p // 2 % 4 = w; see `bit_of`."""

    by_query: Tensor | None
    """int32 [b, heads, blocks of keys, queries, 4]: the words of a query and a block of keys."""
    by_key: Tensor | None
    """int32 [b, heads, blocks of queries, 4, keys]: the words of a key and a block of queries."""


@triton.jit
def bit_of(place):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """Returns the position of a key or query of a block in its word. Neighbours are 16 bits apart."""
    return ((place & 1) << 4) | (place & 8) | ((place >> 4) & 7)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Computes `counter_rng.philox`. One 64-bit product gives both halves; Triton's own Philox multiplies twice."""
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def keep_columns(token, block, step, extra, k0, k1, threshold):  # type: ignore[no-untyped-def]
    """Returns words whose bits tell which of 32 neighbours are kept. `block` is the first of their four Philox blocks.
    The n-th of the 16 words of these blocks has bit n of the random numbers of all 32. Every argument is uint32."""
    found = block | 0xFFFFFFFF
    for number in tl.static_range(4):
        w0, w1, w2, w3 = _philox(token, block + number, step, extra, k0, k1)
        found = _refined(found, w0, threshold, 4 * number)
        found = _refined(found, w1, threshold, 4 * number + 1)
        found = _refined(found, w2, threshold, 4 * number + 2)
        found = _refined(found, w3, threshold, 4 * number + 3)
    return found


@triton.jit
def _refined(found, word, threshold, BIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns `found & word` where the threshold has this bit, `found | word` elsewhere."""
    has = (0 - ((threshold >> BIT) & 1)).to(tl.uint32)  # all bits or none
    return (found & word) | ((found | word) & ~has)


@triton.jit
def _drawn(before, number, token, first, step, head, k0, k1, least):  # type: ignore[no-untyped-def]
    """Returns which of the keys from 32 `number` on are kept, a bit for each of 32, and the last group that was drawn.
    If the first key of the row is not the first of a group, the result joins parts of the groups `before` and next."""
    shift = (first & 31).to(tl.uint32)
    group = ((first >> 5) + number + tl.where(shift > 0, 1, 0)).to(tl.uint32)
    drawn = keep_columns(token, group * 4, step, head, k0, k1, least)
    found = drawn
    if shift > 0:
        found = (before >> shift) | (drawn << (32 - shift))
    return found, drawn


@triton.jit
def _exchanged(x, y, mask, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Exchanges the bits of x under `mask << SHIFT` and those of y under `mask`."""
    return (x & mask) | ((y & mask) << SHIFT), ((x >> SHIFT) & mask) | (y & (mask << SHIFT))


@triton.jit
def _ordered(word):  # type: ignore[no-untyped-def]
    """Exchanges bits whose positions have 0 as highest and 1 as lowest digit with those of 1 and 0."""
    moved = (word ^ (word >> 15)) & 0xAAAA
    return word ^ moved ^ (moved << 15)


@triton.jit
def _transposed(words):  # type: ignore[no-untyped-def]
    """Returns words of which each 32 are the columns of the given 32 (Warren, Hacker's Delight, 7-3): bit i of word j
    is bit j of word i. A warp has 32 words in its threads."""
    columns = words.reshape(words.numel // 32, 32)
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], columns.shape)
    columns = _half_transposed(columns, lane, 16, 0x0000FFFF)
    columns = _half_transposed(columns, lane, 8, 0x00FF00FF)
    columns = _half_transposed(columns, lane, 4, 0x0F0F0F0F)
    columns = _half_transposed(columns, lane, 2, 0x33333333)
    columns = _half_transposed(columns, lane, 1, 0x55555555)
    return columns.reshape(words.shape)


@triton.jit
def _half_transposed(word, lane, DISTANCE: tl.constexpr, LOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Exchanges bits under the complement of LOW with bits under LOW of the column that is DISTANCE behind."""
    behind = (lane & DISTANCE) != 0
    keeps = tl.where(behind, ~LOW, LOW).to(tl.uint32)
    turn = tl.where(behind, 32 - DISTANCE, DISTANCE).to(tl.uint32)
    other = tl.gather(word.to(tl.int32, bitcast=True), lane ^ DISTANCE, 1).to(tl.uint32, bitcast=True)
    other = (other << turn) | (other >> (32 - turn))
    return (word & keeps) | (other & ~keeps)


@triton.jit(do_not_specialize=["first_head", "left", "right", "key_0", "key_1", "threshold"])
def _keep_bits_kernel(  # type: ignore[no-untyped-def]
    by_query, by_key, query, first_key, iteration, rows, blocks, batch, heads, first_head, left, right, key_0, key_1,
    threshold, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    pair, tiles = tl.program_id(2).to(tl.int64), tl.num_programs(0)
    batch_index, head = pair // heads, (pair % heads + first_head).to(tl.uint32)
    tile = tiles - 1 - tl.program_id(0)  # the longest rows of a causal mask come first
    # A warp has the queries of one word, and each of its threads has the query whose bit is the thread's number.
    thread = tl.arange(0, BLOCK)
    warp, lane = thread >> 5, thread & 31
    row = tile * BLOCK + (lane & 7) * 16 + (lane & 8) + warp * 2 + (lane >> 4)
    token = tl.load(query + row.to(tl.int64) * batch + batch_index, mask=row < rows, other=0).to(tl.uint32)
    first = tl.load(first_key + batch_index)
    block = tl.program_id(1) * BLOCKS
    end = tl.minimum(block + BLOCKS, blocks)
    if HAS_RIGHT:
        end = tl.minimum(end, (tl.maximum(tile * BLOCK + BLOCK - 1 + right, -1) + BLOCK) // BLOCK)
    if HAS_LEFT:
        block = tl.maximum(block, tl.maximum(tile * BLOCK - left, 0) // BLOCK)
    step, least = tl.load(iteration).to(tl.uint32), threshold.to(tl.uint32)
    k0, k1 = key_0.to(tl.uint32), key_1.to(tl.uint32)
    last = tl.zeros((BLOCK,), tl.uint32)
    if ((first & 31) > 0) & (end > block):
        last = keep_columns(token, ((first >> 5) + block * 4).to(tl.uint32) * 4, step, head, k0, k1, least)
    for number in range(block, end):
        w0, last = _drawn(last, number * 4, token, first, step, head, k0, k1, least)
        w1, last = _drawn(last, number * 4 + 1, token, first, step, head, k0, k1, least)
        w2, last = _drawn(last, number * 4 + 2, token, first, step, head, k0, k1, least)
        w3, last = _drawn(last, number * 4 + 3, token, first, step, head, k0, k1, least)
        if BY_KEY:
            at = by_key + ((pair * tiles + tile) * 4 + warp) * (blocks * BLOCK) + number * BLOCK + lane
            tl.store(at, _transposed(w0).to(tl.int32, bitcast=True))
            tl.store(at + 32, _transposed(w1).to(tl.int32, bitcast=True))
            tl.store(at + 64, _transposed(w2).to(tl.int32, bitcast=True))
            tl.store(at + 96, _transposed(w3).to(tl.int32, bitcast=True))
        if BY_QUERY:
            # The words of 32 neighbours become those of every fourth pair.
            w0, w2 = _exchanged(w0, w2, 0x0F0F0F0F, 4)
            w1, w3 = _exchanged(w1, w3, 0x0F0F0F0F, 4)
            w0, w1 = _exchanged(w0, w1, 0x33333333, 2)
            w2, w3 = _exchanged(w2, w3, 0x33333333, 2)
            found = tl.join(tl.join(_ordered(w0), _ordered(w2)), tl.join(_ordered(w1), _ordered(w3)))
            place = ((pair * blocks + number) * (tiles * BLOCK) + row) * 4
            at = by_query + place[:, None] + tl.arange(0, 4)[None, :]
            tl.store(at, found.reshape(BLOCK, 4).to(tl.int32, bitcast=True))


def keep_bits_triton(
    draw: Draw,
    query: Tensor,
    first_key: Tensor,
    num_keys: int,
    heads: range,
    seen: SeenKeys,
    by_query: bool,
    by_key: bool,
) -> KeepBits:
    """Returns `dropout.keep_attention` as bits, in the orders that are asked for.

    `query` is int64 [sq, b], the global token index of each query; `first_key` int64 [b], that of each row's first key,
    which the others follow; `heads` are indices over the whole model.
    """
    sq, b = query.shape
    size = BLOCK.value
    tiles, blocks = cdiv(sq, size), cdiv(num_keys, size)
    assert draw.bits == 16 and 0 <= draw.threshold < 2**16

    def bits(*shape: int) -> Tensor:
        return torch.empty((b, len(heads), *shape), dtype=torch.int32, device=query.device)

    found = KeepBits(
        bits(blocks, tiles * size, 4) if by_query else None, bits(tiles, 4, blocks * size) if by_key else None
    )
    _keep_bits_kernel[(tiles, cdiv(blocks, _BLOCKS), b * len(heads))](
        found.by_query, found.by_key, query.contiguous(), first_key.contiguous(), draw.iteration, sq, blocks, b,
        len(heads), heads.start, seen.left or 0, seen.right or 0, *draw.key, draw.threshold,
        HAS_LEFT=seen.left is not None, HAS_RIGHT=seen.right is not None, BY_QUERY=by_query, BY_KEY=by_key,
        BLOCKS=_BLOCKS, num_warps=4,
    )  # fmt: skip
    return found
