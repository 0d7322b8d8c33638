"""Dropout masks of attention probabilities on a GPU, one bit for each pair of a query and a key.

An attention kernel that drew its own masks would draw each mask two or three times. Here the bits are drawn once, at
the speed of integer arithmetic, and read in forward and backward.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.dropout.dropout import Draw

WORD = 32
"""Keys whose bits share a word."""
_ROWS = 128
"""Queries of a program."""
_WORDS = 32
"""Most words of a query that a program draws."""


@dataclass(frozen=True)
class SeenKeys:
    """Which keys queries see. The bits of other pairs are left undefined."""

    left: int | None
    """Query i sees key j if j >= i - left; None: no limit."""
    right: int | None
    """Query i sees key j only if also j <= i + right; None: no limit."""


@triton.jit
def byte_of_key(key):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """Returns the position in a word of the byte that holds a key's bit, in bits. One thread of a matrix product has
    the eight keys of a byte in its registers."""
    return ((key >> 1) & 3) * 8


@triton.jit
def bit_of_key(key):  # type: ignore[no-untyped-def]
    """Returns the position of a key's bit in its byte."""
    return ((key >> 3) & 3) * 2 + (key & 1)


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


@triton.jit(do_not_specialize=["first_head", "left", "right", "key_0", "key_1", "threshold"])
def _keep_bits_kernel(  # type: ignore[no-untyped-def]
    bits, query, first_key, iteration, rows, words, batch, heads, first_head, left, right, key_0, key_1, threshold,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(2).to(tl.int64)
    batch_index, head = pair // heads, (pair % heads + first_head).to(tl.uint32)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest rows of a causal mask come first
    row = start + tl.arange(0, ROWS)
    token = tl.load(query + row.to(tl.int64) * batch + batch_index, mask=row < rows, other=0).to(tl.uint32)
    first = tl.load(first_key + batch_index)
    shift = (first & 31).to(tl.uint32)
    word = tl.program_id(1) * WORDS
    end = tl.minimum(word + WORDS, words)
    if HAS_RIGHT:
        end = tl.minimum(end, (tl.maximum(start + ROWS - 1 + right, -1) + 32) // 32)
    if HAS_LEFT:
        word = tl.maximum(word, tl.maximum(start - left, 0) // 32)
    step, least = tl.load(iteration).to(tl.uint32), threshold.to(tl.uint32)
    k0, k1 = key_0.to(tl.uint32), key_1.to(tl.uint32)
    packed = tl.zeros((ROWS,), tl.uint32)
    # If the first key is not the first of a group of 32, each result joins parts of two drawn words: draws one more.
    last = tl.where(shift == 0, end, end + 1)
    for number in range(word, tl.where(end > word, last, word)):
        block = ((first >> 5) + number).to(tl.uint32) * 4
        before = packed
        packed = keep_columns(token, block, step, head, k0, k1, least)
        whole, place = packed, number
        if shift > 0:
            whole, place = (before >> shift) | (packed << (32 - shift)), number - 1
        moved = (whole ^ (whole >> 12)) & 0xF0F0  # exchanges groups of four bits, then of two: see `bit_of_key`
        whole ^= moved ^ (moved << 12)
        moved = (whole ^ (whole >> 6)) & 0xCC00CC
        whole ^= moved ^ (moved << 6)
        if place >= word:
            tl.store(bits + (pair * words + place) * rows + row, whole.to(tl.int32, bitcast=True), mask=row < rows)


def keep_bits_triton(
    draw: Draw, query: Tensor, first_key: Tensor, num_keys: int, heads: range, seen: SeenKeys
) -> Tensor:
    """Returns `dropout.keep_attention` as bits: int32 [b, heads, num_keys / 32 rounded up, sq]. Word w tells which of
    the keys 32 w to 32 w + 31 are kept; `byte_of_key` and `bit_of_key` say where.

    `query` is int64 [sq, b], the global token index of each query; `first_key` int64 [b], that of each row's first key,
    which the others follow; `heads` are indices over the whole model.
    """
    sq, b = query.shape
    words = triton.cdiv(num_keys, WORD)
    bits = torch.empty((b, len(heads), words, sq), dtype=torch.int32, device=query.device)
    assert draw.bits == 16 and 0 <= draw.threshold < 2**16
    _keep_bits_kernel[(triton.cdiv(sq, _ROWS), triton.cdiv(words, _WORDS), b * len(heads))](
        bits, query.contiguous(), first_key.contiguous(), draw.iteration, sq, words, b, len(heads), heads.start,
        seen.left or 0, seen.right or 0, *draw.key, draw.threshold,
        HAS_LEFT=seen.left is not None, HAS_RIGHT=seen.right is not None, ROWS=_ROWS, WORDS=_WORDS, num_warps=4,
    )  # fmt: skip
    return bits
