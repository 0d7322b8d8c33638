"""Finds near-duplicates: locality-sensitive hashing of MinHash signatures proposes pairs, which are then verified.

A signature is cut into bands. Two items are compared if all values of a band agree (Leskovec, Rajaraman & Ullman,
"Mining of Massive Datasets", chapter 3). Items are decided in the order of the input: an item goes if an item that was
kept before it has a true Jaccard similarity of at least the threshold.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron.core.utils.compiled import compiled
from megatron.data.cleaning.shingles import jaccard

_MOST_VALUES = 128
_LEAST_RECALL = 0.99
_MOST_WALKED = 4096
"""Most kept items of one bucket that an item is compared with by signature. It bounds the time for millions of texts
that share much, but less than the threshold."""
_MOST_VERIFIED = 64
"""Most kept items whose text is compared with an item's, the most similar signatures first."""
_CACHED_HASHES = 8 << 20
"""Hashes of kept items in memory, 64 MiB."""


@dataclass(frozen=True)
class Bands:
    """How a signature is cut: `count` bands of `rows` values."""

    count: int
    rows: int

    @property
    def size(self) -> int:
        """Values of a signature."""
        return self.count * self.rows

    def recall(self, similarity: float) -> float:
        """Probability that two items of this Jaccard similarity are compared."""
        return float(1 - (1 - similarity**self.rows) ** self.count)


def choose_bands(threshold: float) -> Bands:
    """Returns the longest bands of at most 128 values in all that find 99% of the pairs at the threshold."""
    choices = (Bands(_MOST_VALUES // rows, rows) for rows in range(16, 0, -1))
    return next((bands for bands in choices if bands.recall(threshold) >= _LEAST_RECALL), Bands(_MOST_VALUES, 1))


def band_keys(signatures: np.ndarray, bands: Bands) -> np.ndarray:
    """Returns a hash of each band of signatures [n, size]: uint64 [count, n]."""
    keys = np.empty((bands.count, len(signatures)), np.uint64)
    _hash_bands(signatures, bands.rows, keys)
    return keys


@dataclass(frozen=True)
class Buckets:
    """The items that share a band with another item."""

    items: np.ndarray
    """Their numbers, ascending, int64 [m]."""
    buckets: np.ndarray
    """Bucket of each band of each item; -1 if it is alone in it. int64 [m, bands]."""
    count: int
    """Number of buckets."""


def find_buckets(keys: np.ndarray, alive: np.ndarray) -> Buckets:
    """Groups the items with `alive` (bool [n]) by their keys [bands, n], one band at a time in memory."""
    numbers = np.flatnonzero(alive)
    shared = np.zeros(len(numbers), bool)
    for band in keys:
        shared |= _group(band[numbers])[1]
    items = numbers[shared]
    buckets = np.empty((len(items), len(keys)), np.int64)
    count = 0
    for index, band in enumerate(keys):
        group, several = _group(band[items])
        buckets[:, index] = np.where(several, group + count, -1)
        count += len(items)
    return Buckets(items, buckets, count)


def _group(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of each key's group, and whether the group has several members."""
    _, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    return group, sizes[group] > 1


@dataclass(frozen=True)
class Decisions:
    """What was decided for each item of `Buckets`."""

    duplicate_of: np.ndarray
    """Index of the kept item that is similar; -1 for a kept item. int64 [m]."""
    similarity: np.ndarray
    """Jaccard similarity with it, float64 [m]."""


def decide(
    found: Buckets, signatures: np.ndarray, threshold: float, hashes_of: Callable[[int], np.ndarray]
) -> Decisions:
    """Decides the items in their order. `signatures` is uint32 [m, size]; `hashes_of(index)` reads the shingles of the
    text of an item."""
    size = signatures.shape[1]
    # Four standard deviations of the estimate: one pair in 30,000 at the threshold is missed.
    least = size * (threshold - 4 * (threshold * (1 - threshold) / size) ** 0.5)
    heads = np.full(found.count, -1, np.int32)
    following = np.full(found.buckets.shape, -1, np.int32)
    seen = np.full(len(found.items), -1, np.int32)
    candidates, scores = (np.empty(_MOST_WALKED * found.buckets.shape[1], np.int32) for _ in range(2))
    duplicate_of = np.full(len(found.items), -1, np.int64)
    similarity = np.zeros(len(found.items))
    cache = _HashCache(hashes_of)
    for index in range(len(found.items)):
        count = _find_kept(
            index, found.buckets, heads, following, seen, signatures, least, _MOST_WALKED, candidates, scores
        )
        if count:
            best = np.lexsort((candidates[:count], -scores[:count]))[:_MOST_VERIFIED]
            own = hashes_of(index)
            for other in candidates[:count][best].tolist():
                value = jaccard(own, cache.get(other))
                if value >= threshold:
                    duplicate_of[index], similarity[index] = other, value
                    break
        if duplicate_of[index] < 0:
            _keep(index, found.buckets, heads, following)
    return Decisions(duplicate_of, similarity)


class _HashCache:
    """Shingles of the kept items that were compared last."""

    def __init__(self, read: Callable[[int], np.ndarray]) -> None:
        self._read = read
        self._held: OrderedDict[int, np.ndarray] = OrderedDict()
        self._hashes = 0

    def get(self, index: int) -> np.ndarray:
        if index in self._held:
            self._held.move_to_end(index)
            return self._held[index]
        hashes = self._held[index] = self._read(index)
        self._hashes += hashes.size
        while self._hashes > _CACHED_HASHES and len(self._held) > 1:
            self._hashes -= self._held.popitem(last=False)[1].size
        return hashes


@compiled
def _hash_bands(signatures: np.ndarray, rows: int, keys: np.ndarray) -> None:
    for item in range(signatures.shape[0]):
        for band in range(keys.shape[0]):
            value = np.uint64(band + 1)
            for k in range(band * rows, (band + 1) * rows):
                value = (value ^ np.uint64(signatures[item, k])) * np.uint64(0x9E3779B97F4A7C15)
                value = value ^ (value >> np.uint64(29))
            keys[band, item] = value


@compiled
def _find_kept(  # type: ignore[no-untyped-def]
    index, buckets, heads, following, seen, signatures, least, most, candidates, scores
):
    """Collects the kept items that share a bucket with an item and whose signatures agree in `least` places."""
    count = 0
    for band in range(buckets.shape[1]):
        bucket = buckets[index, band]
        if bucket < 0:
            continue
        other = heads[bucket]
        walked = 0
        while other >= 0 and walked < most:
            walked += 1
            if seen[other] != index:
                seen[other] = index
                agree = 0
                for k in range(signatures.shape[1]):
                    agree += signatures[index, k] == signatures[other, k]
                if agree >= least:
                    candidates[count], scores[count] = other, agree
                    count += 1
            other = following[other, band]
    return count


@compiled
def _keep(index, buckets, heads, following):  # type: ignore[no-untyped-def]
    for band in range(buckets.shape[1]):
        bucket = buckets[index, band]
        if bucket >= 0:
            following[index, band] = heads[bucket]
            heads[bucket] = index
