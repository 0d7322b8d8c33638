"""Word n-grams (shingles) of a text as 64-bit hashes, their MinHash signature, and the Jaccard similarity of two sets.

A word is what `str.split()` gives: characters between white space, compared as they are. A text of fewer than n words
has one shingle, all of its words; a text without words has none.

MinHash: Broder, "On the resemblance and containment of documents" (1997).
"""

import functools

import numpy as np

from megatron.core.utils.compiled import compiled, compiled_inline

WORDS = 5
"""Words of a shingle."""

_EMPTY = np.uint32(0xFFFFFFFF)
_WORD_PRIME = np.uint64(0x100000001B3)
_WORD_START = np.uint64(0xCBF29CE484222325)
_ORDER = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_U27, _U30, _U31, _U32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


def shingle_hashes(text: str, words: int = WORDS) -> np.ndarray:
    """Returns the sorted, distinct hashes of a text's shingles, uint64."""
    return np.unique(_hash_shingles(_bytes_of(text), words))


def hashes_in_order(text: str, words: int) -> np.ndarray:
    """Returns the hash of each shingle of a text, uint64, in the order of the text."""
    hashed: np.ndarray = _hash_shingles(_bytes_of(text), words)
    return hashed


def signature(text: str, size: int) -> np.ndarray:
    """Returns the MinHash signature of a text's shingles, uint32 [size]. Two signatures agree in about as many places
    as the Jaccard similarity of the two sets of shingles."""
    factors, summands = _hash_functions(size)
    result = np.full(size, _EMPTY)
    _take_minima(_hash_shingles(_bytes_of(text), WORDS), factors, summands, result)
    return result


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the size of the intersection over the size of the union of two sets of hashes (sorted and distinct); 1
    for two empty sets."""
    if not one.size and not other.size:
        return 1.0
    common = _count_common(one, other)
    return float(common / (one.size + other.size - common))


def _bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(errors="replace"), np.uint8)


@functools.lru_cache
def _hash_functions(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns odd factors and summands: fixed numbers, so that all runs and workers have the same."""
    numbers = np.random.Generator(np.random.PCG64(5)).integers(0, 1 << 64, (2, size), dtype=np.uint64)
    return numbers[0] | np.uint64(1), numbers[1]


@compiled_inline
def _space_length(text, i):  # type: ignore[no-untyped-def]
    """Bytes of the white space (as in Python) that begins at byte i of a UTF-8 text; 0 for another character."""
    c = text[i]
    if c < 0x80:
        return 1 if c == 32 or 9 <= c <= 13 or 28 <= c <= 31 else 0
    left = text.size - i
    if c == 0xC2:
        return 2 if left > 1 and (text[i + 1] == 0x85 or text[i + 1] == 0xA0) else 0
    if left < 3 or not (0xE1 <= c <= 0xE3):
        return 0
    d, e = text[i + 1], text[i + 2]
    space = (
        (c == 0xE1 and d == 0x9A and e == 0x80)
        or (c == 0xE2 and d == 0x80 and (e <= 0x8A or e == 0xA8 or e == 0xA9 or e == 0xAF))
        or (c == 0xE2 and d == 0x81 and e == 0x9F)
        or (c == 0xE3 and d == 0x80 and e == 0x80)
    )
    return 3 if space else 0


@compiled
def _hash_shingles(text: np.ndarray, words: int) -> np.ndarray:
    hashes = np.empty(text.size // 2 + 1, np.uint64)  # a word and the space after it take two bytes
    count, i, inside, value = 0, 0, False, _WORD_START
    while i < text.size:
        space = _space_length(text, i)
        if space == 0:
            value = (value ^ np.uint64(text[i])) * _WORD_PRIME
            inside = True
            i += 1
            continue
        if inside:
            hashes[count] = value
            count += 1
            inside, value = False, _WORD_START
        i += space
    if inside:
        hashes[count] = value
        count += 1
    if count == 0:
        return hashes[:0]
    length = min(words, count)
    result = np.empty(count - length + 1, np.uint64)
    for start in range(result.size):
        value = np.uint64(length)
        for k in range(length):
            value = (value ^ hashes[start + k]) * _ORDER
            value = value ^ (value >> _U32)
        value = (value ^ (value >> _U30)) * _MIX1
        value = (value ^ (value >> _U27)) * _MIX2
        result[start] = value ^ (value >> _U31)
    return result


@compiled
def _take_minima(hashes: np.ndarray, factors: np.ndarray, summands: np.ndarray, result: np.ndarray) -> None:
    for i in range(hashes.size):
        value = hashes[i]
        for k in range(result.size):
            hashed = np.uint32((value * factors[k] + summands[k]) >> _U32)
            result[k] = min(result[k], hashed)


@compiled
def _count_common(one: np.ndarray, other: np.ndarray) -> int:
    i = j = common = 0
    while i < one.size and j < other.size:
        a, b = one[i], other[j]
        if a == b:
            common += 1
        if a <= b:
            i += 1
        if b <= a:
            j += 1
    return common
