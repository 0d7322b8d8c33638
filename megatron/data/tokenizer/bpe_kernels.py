"""Byte-level BPE in compiled kernels: the ids of a word come from a cache of words, or from merging.

Text is a flat uint8 array, padded with `PADDING` bytes so that eight bytes can be read at any position. `byte_level.py`
makes the arrays and documents the result.

The merging is that of Sennrich et al. 2016 (arXiv:1508.07909) as GPT-2 applies it: while any neighbouring pair of ids
has a merge, the pair with the lowest rank, leftmost first, becomes one id. A heap holds the candidate pairs, so that a
word of n bytes costs O(n log n), however long the word.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np

from megatron.core.utils.compiled import compiled, compiled_inline

PADDING = 8
_EMPTY_PAIR = -1
_MAX_CACHED_BYTES = 64


class Merges(NamedTuple):
    """Hash table from a pair of ids to the rank and the resulting id of its merge."""

    pairs: np.ndarray  # int64 [slots], left << 32 | right, or -1
    ranks: np.ndarray  # int32 [slots]
    results: np.ndarray  # int32 [slots]
    byte_ids: np.ndarray  # int32 [256], the id of each single byte


class WordTable(NamedTuple):
    """Hash table from the bytes of a word to its ids; open addressing, at most half full.

    A slot is (first eight bytes, length << 32 | number of ids, position of the other bytes in `tails`, the id if there
    is one, otherwise the position of the ids in `ids`). Lookups compare whole words, so they are always right.
    """

    slots: np.ndarray  # uint64 [slots, 4]
    tails: np.ndarray  # uint64 [...], bytes 8.. of the words longer than eight, eight to an entry
    ids: np.ndarray  # int32 [...]
    used: np.ndarray  # int64 [3]: words, entries of tails, entries of ids


@compiled
def _mix(x: Any) -> Any:
    x = x * np.uint64(0x9E3779B97F4A7C15)
    return x ^ (x >> np.uint64(29))


@compiled
def _load(text: Any, i: Any, n: Any) -> Any:
    """Returns the next min(n, 8) bytes as one little-endian number."""
    word = (
        np.uint64(text[i])
        | (np.uint64(text[i + 1]) << np.uint64(8))
        | (np.uint64(text[i + 2]) << np.uint64(16))
        | (np.uint64(text[i + 3]) << np.uint64(24))
        | (np.uint64(text[i + 4]) << np.uint64(32))
        | (np.uint64(text[i + 5]) << np.uint64(40))
        | (np.uint64(text[i + 6]) << np.uint64(48))
        | (np.uint64(text[i + 7]) << np.uint64(56))
    )
    if n < 8:
        word &= (np.uint64(1) << np.uint64(8 * n)) - np.uint64(1)
    return word


# --- merges ----------------------------------------------------------------------------------------------------------


@compiled
def fill_merges(merges: Merges, pairs: Any, results: Any) -> None:
    """Enters merge r: pairs[r] becomes results[r]. A pair that occurs twice gets its later rank, as in `tokenizers`."""
    mask = np.uint64(merges.pairs.size - 1)
    for rank in range(pairs.size):
        slot = _mix(np.uint64(pairs[rank])) & mask
        while merges.pairs[slot] != _EMPTY_PAIR and merges.pairs[slot] != pairs[rank]:
            slot = (slot + np.uint64(1)) & mask
        merges.pairs[slot] = pairs[rank]
        merges.ranks[slot] = rank
        merges.results[slot] = results[rank]


@compiled
def _find_merge(merges: Any, left: Any, right: Any) -> Any:
    """Returns the slot of the merge of two ids, or -1."""
    pair = np.int64(left) << 32 | np.int64(right)
    mask = np.uint64(merges.pairs.size - 1)
    slot = _mix(np.uint64(pair)) & mask
    while merges.pairs[slot] != _EMPTY_PAIR:
        if merges.pairs[slot] == pair:
            return np.int64(slot)
        slot = (slot + np.uint64(1)) & mask
    return np.int64(-1)


@compiled
def _merge_word(text: Any, i: Any, n: Any, merges: Any, ids: Any, after: Any, before: Any, heap: Any) -> Any:
    """Writes the ids of the n bytes at i to ids[:count] and returns count. `after` and `before` link the ids left."""
    for k in range(n):
        ids[k] = merges.byte_ids[text[i + k]]
        after[k] = k + 1 if k + 1 < n else -1
        before[k] = k - 1
    heap.clear()
    for k in range(n - 1):
        slot = _find_merge(merges, ids[k], ids[k + 1])
        if slot >= 0:
            heap.append(np.int64(merges.ranks[slot]) << 32 | k)
    heapq.heapify(heap)
    while len(heap) > 0:
        top = heapq.heappop(heap)
        k = top & 0xFFFFFFFF
        right = after[k]
        if ids[k] < 0 or right < 0:
            continue
        slot = _find_merge(merges, ids[k], ids[right])
        if slot < 0 or merges.ranks[slot] != top >> 32:
            continue  # the pair has changed since it was queued
        ids[k] = merges.results[slot]
        ids[right] = -1
        after[k] = after[right]
        if after[k] >= 0:
            before[after[k]] = k
            slot = _find_merge(merges, ids[k], ids[after[k]])
            if slot >= 0:
                heapq.heappush(heap, np.int64(merges.ranks[slot]) << 32 | k)
        if before[k] >= 0:
            slot = _find_merge(merges, ids[before[k]], ids[k])
            if slot >= 0:
                heapq.heappush(heap, np.int64(merges.ranks[slot]) << 32 | np.int64(before[k]))
    count, left = 0, 0
    while left >= 0:
        ids[count] = ids[left]
        count += 1
        left = after[left]
    return count


# --- the cache of words ----------------------------------------------------------------------------------------------


@compiled
def _find_word(slots: Any, tails: Any, text: Any, i: Any, n: Any) -> Any:
    """Returns the slot of the word of n bytes at i, or the empty slot where it belongs."""
    mask = np.uint64(slots.shape[0] - 1)
    first = _load(text, i, n)
    hashed = _mix(first) + np.uint64(n)
    k = 8
    while k < n:
        hashed = _mix(hashed ^ _load(text, i + k, n - k))
        k += 8
    slot = hashed & mask
    while slots[slot, 1] != 0:
        same_head = slots[slot, 0] == first and slots[slot, 1] >> np.uint64(32) == np.uint64(n)
        if same_head and (n <= 8 or _same_tail(tails, np.int64(slots[slot, 2]), text, i, n)):
            break
        slot = (slot + np.uint64(1)) & mask
    return slot


@compiled
def _same_tail(tails: Any, tail: Any, text: Any, i: Any, n: Any) -> Any:
    k = 8
    while k < n:
        if tails[tail] != _load(text, i + k, n - k):
            return False
        tail += 1
        k += 8
    return True


@compiled
def _keep_word(table: Any, slot: Any, text: Any, i: Any, n: Any, ids: Any, count: Any) -> None:
    """Enters the word at i into the slot that `_find_word` returned. Empties a full table first."""
    words, tail, start = np.int64(table.used[0]), np.int64(table.used[1]), np.int64(table.used[2])
    if 2 * words >= table.slots.shape[0] or tail + n // 8 + 1 > table.tails.size or start + count > table.ids.size:
        for k in range(table.slots.shape[0]):
            table.slots[k, 1] = 0
        words = tail = start = np.int64(0)
        slot = _find_word(table.slots, table.tails, text, i, n)
    table.slots[slot, 0] = _load(text, i, n)
    table.slots[slot, 1] = np.uint64(n) << np.uint64(32) | np.uint64(count)
    table.slots[slot, 2] = np.uint64(tail)
    for k in range(8, n, 8):
        table.tails[tail] = _load(text, i + k, n - k)
        tail += 1
    if count == 1:
        table.slots[slot, 3] = np.uint64(ids[0])
    else:
        table.slots[slot, 3] = np.uint64(start)
        for k in range(count):
            table.ids[start + k] = ids[k]
        start += count
    table.used[0] = words + 1
    table.used[1] = tail
    table.used[2] = start


@compiled
def fill_words(table: WordTable, text: Any, bounds: Any, ids: Any) -> None:
    """Enters whole words: bytes bounds[k]:bounds[k + 1] have the id ids[k]. The table must be large enough."""
    for k in range(ids.size):
        n = bounds[k + 1] - bounds[k]
        slot = _find_word(table.slots, table.tails, text, bounds[k], n)
        _keep_word(table, slot, text, bounds[k], n, ids[k : k + 1], 1)


@compiled_inline
def _emit(slots: Any, ids: Any, slot: Any, out: Any, total: Any) -> Any:
    """Copies the ids of a known word to out[total:]. Returns the new total."""
    count = np.int64(slots[slot, 1] & np.uint64(0xFFFFFFFF))
    place = np.int64(slots[slot, 3])
    if count == 1:
        out[total] = place
    else:
        for m in range(count):
            out[total + m] = ids[place + m]
    return total + count


@compiled
def encode_words(text: Any, ends: Any, counts: Any, merges: Any, whole: Any, cache: Any, out: Any, lengths: Any) -> Any:
    """Encodes consecutive words, which begin at byte 0 and end at `ends`. The first counts[0] words are text 0, etc.

    Writes the ids to `out`, which has room for one per byte, and the number of ids of text k to lengths[k]. A word in
    `whole` gets its single id without merging. Returns the number of ids.
    """
    slots, tails, cached_ids = cache.slots, cache.tails, cache.ids
    heap = [np.int64(0)]
    total = np.int64(0)
    word = 0
    i = np.int64(0)
    for k in range(counts.size):
        start = total
        for _ in range(counts[k]):
            n = ends[word] - i
            slot = np.uint64(0)
            if n <= _MAX_CACHED_BYTES:
                slot = _find_word(slots, tails, text, i, n)
            if n <= _MAX_CACHED_BYTES and slots[slot, 1] != 0:
                total = _emit(slots, cached_ids, slot, out, total)
            else:
                count = _encode_unseen(text, i, n, merges, whole, out[total : total + n], heap)
                if n <= _MAX_CACHED_BYTES:
                    _keep_word(cache, slot, text, i, n, out[total : total + count], count)
                total += count
            i = np.int64(ends[word])
            word += 1
        lengths[k] = total - start
    return total


@compiled
def _encode_unseen(text: Any, i: Any, n: Any, merges: Any, whole: Any, out: Any, heap: Any) -> Any:
    """Writes the ids of the n bytes at i, from whole words of the vocabulary or by merging. Returns their number."""
    if whole.used[0] > 0:
        slot = _find_word(whole.slots, whole.tails, text, i, n)
        if whole.slots[slot, 1] != 0:
            return _emit(whole.slots, whole.ids, slot, out, np.int64(0))
    return _merge_word(text, i, n, merges, out, np.empty(n, np.int32), np.empty(n, np.int32), heap)
