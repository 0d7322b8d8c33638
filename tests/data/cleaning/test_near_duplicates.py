"""megatron/data/cleaning/near_duplicates.py: against all pairs, and against datasketch."""

import random

import numpy as np
import pytest

from megatron.data.cleaning.near_duplicates import Bands, band_keys, choose_bands, decide, find_buckets
from megatron.data.cleaning.shingles import jaccard, shingle_hashes, signature


def texts_with_copies(seed: int, originals: int = 150) -> list[str]:
    """Random texts, each with a copy in which some words are changed."""
    source = random.Random(seed)
    texts = []
    for _ in range(originals):
        words = [f"w{source.randrange(5000)}" for _ in range(200)]
        copy = words[:]
        for place in source.sample(range(200), source.choice([1, 2, 3, 5, 8, 15, 30])):
            copy[place] = "changed"
        texts += [" ".join(words), " ".join(copy)]
    source.shuffle(texts)
    return texts


def dropped_of(texts: list[str], threshold: float) -> dict[int, int]:
    bands = choose_bands(threshold)
    signatures = np.stack([signature(text, bands.size) for text in texts])
    found = find_buckets(band_keys(signatures, bands), np.ones(len(texts), bool))
    decisions = decide(found, signatures[found.items], threshold, lambda i: shingle_hashes(texts[found.items[i]]))
    return {
        int(found.items[index]): int(found.items[other])
        for index, other in enumerate(decisions.duplicate_of)
        if other >= 0
    }


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_rows_go_exactly_if_a_kept_row_is_similar(threshold):
    texts = texts_with_copies(1)
    hashes = [shingle_hashes(text) for text in texts]
    kept, expected = [], set()
    for index, own in enumerate(hashes):
        if any(jaccard(own, hashes[other]) >= threshold for other in kept):
            expected.add(index)
        else:
            kept.append(index)
    dropped = dropped_of(texts, threshold)
    assert set(dropped) <= expected and len(dropped) >= 0.97 * len(expected) > 0
    for index, other in dropped.items():
        assert other < index and other not in dropped and jaccard(hashes[index], hashes[other]) >= threshold


def test_bands_find_pairs_at_the_threshold():
    assert choose_bands(0.8) == Bands(21, 6)
    for threshold in (0.3, 0.5, 0.8, 0.9, 1.0):
        bands = choose_bands(threshold)
        assert bands.size <= 128 and bands.recall(threshold) >= 0.99
    assert Bands(2, 1).recall(0.5) == 0.75


def test_datasketch_finds_no_more():
    datasketch = pytest.importorskip("datasketch")
    texts = texts_with_copies(2)
    index = datasketch.MinHashLSH(threshold=0.8, num_perm=128)
    theirs = set()
    for number, text in enumerate(texts):
        words = text.split()
        sketch = datasketch.MinHash(num_perm=128)
        sketch.update_batch([" ".join(words[i : i + 5]).encode() for i in range(len(words) - 4)])
        similar = [jaccard(shingle_hashes(text), shingle_hashes(texts[int(other)])) for other in index.query(sketch)]
        if any(value >= 0.8 for value in similar):
            theirs.add(number)
        else:
            index.insert(str(number), sketch)
    ours = dropped_of(texts, 0.8)
    assert len(theirs) > 50 and len(theirs - set(ours)) <= 1
