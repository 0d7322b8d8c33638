"""The compiled kernels of byte-level BPE: merging against a plain loop, the tables of merges and words."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.tokenizer.bpe_kernels import PADDING, Merges, WordTable, encode_words, fill_merges, fill_words

BYTE_IDS = np.arange(256, dtype=np.int32)


def merge_table(merges: list[tuple[int, int]], slots: int = 64) -> Merges:
    """Merge r of `merges` gives id 256 + r."""
    table = Merges(np.full(slots, -1, np.int64), np.zeros(slots, np.int32), np.zeros(slots, np.int32), BYTE_IDS)
    pairs = np.array([left << 32 | right for left, right in merges], np.int64)
    fill_merges(table, pairs, np.arange(256, 256 + len(merges), dtype=np.int32))
    return table


def word_table(slots: int = 64, tails: int = 64, ids: int = 64) -> WordTable:
    return WordTable(
        np.zeros((slots, 4), np.uint64), np.zeros(tails, np.uint64), np.zeros(ids, np.int32), np.zeros(3, np.int64)
    )


def encode(
    words: list[bytes],
    merges: Merges,
    cache: WordTable,
    whole: WordTable | None = None,
    counts: list[int] | None = None,
) -> tuple[list[int], list[int]]:
    text = np.frombuffer(b"".join(words) + bytes(PADDING), np.uint8)
    ends = np.cumsum([len(word) for word in words]).astype(np.int32)
    of_texts = np.array(counts or [len(words)], np.int64)
    out, lengths = np.zeros(text.size, np.int32), np.zeros(of_texts.size, np.int64)
    total = encode_words(text, ends, of_texts, merges, whole or word_table(2, 1, 1), cache, out, lengths)
    return out[:total].tolist(), lengths.tolist()


def merge_plainly(word: bytes, merges: list[tuple[int, int]]) -> list[int]:
    """While any neighbouring pair has a merge, the best pair becomes one id, leftmost first."""
    ids = list(word)
    while True:
        ranked = [(merges.index(pair), at) for at, pair in enumerate(itertools.pairwise(ids)) if pair in merges]
        if not ranked:
            return ids
        rank, at = min(ranked)
        ids[at : at + 2] = [256 + rank]


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_merging_takes_the_best_pair_first(data: st.DataObject) -> None:
    letters = st.sampled_from(b"ab")
    merges: list[tuple[int, int]] = []
    for rank in range(data.draw(st.integers(1, 6))):
        known = st.one_of(letters, st.integers(256, 255 + rank)) if rank else letters
        pair = data.draw(st.tuples(known, known).filter(lambda pair: pair not in merges))
        merges.append(pair)
    words = data.draw(st.lists(st.lists(letters, min_size=1, max_size=12).map(bytes), min_size=1, max_size=5))
    expected = [merge_plainly(word, merges) for word in words]
    found = encode(words * 2, merge_table(merges), word_table())  # the second time from the cache
    assert found[0] == [i for ids in expected * 2 for i in ids]


def test_ids_are_counted_by_text() -> None:
    ids, lengths = encode([b"ab", b"c", b"ab"], merge_table([(97, 98)]), word_table(), counts=[2, 0, 1])
    assert ids == [256, 99, 256] and lengths == [2, 0, 1]


def test_a_pair_that_occurs_twice_has_its_later_rank() -> None:
    merges = merge_table([(97, 98), (98, 99), (97, 98)])
    assert encode([b"abc"], merges, word_table())[0] == [97, 257]
    assert encode([b"ab"], merges, word_table())[0] == [258]


def test_whole_words_are_not_merged() -> None:
    whole = word_table()
    text = np.frombuffer(b"abcdefghij" + b"ab" + bytes(PADDING), np.uint8)
    fill_words(whole, text, np.array([0, 10, 12]), np.array([900, 901], np.int32))
    ids, _ = encode([b"ab", b"abcdefghij", b"abcdefghik"[:9]], merge_table([(97, 98)]), word_table(), whole)
    assert ids == [901, 900, 256, *b"cdefghi"]


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 64, 65])
def test_words_that_differ_in_one_byte_are_told_apart(length: int) -> None:
    words = [b"x" * length, b"x" * (length - 1) + b"y", b"x" * (length - 1), b"z" + b"x" * (length - 1)]
    cache = word_table(256, 256, 1024)
    for _ in range(2):
        assert encode(words, merge_table([]), cache)[0] == [byte for word in words for byte in word]


@pytest.mark.parametrize("sizes", [(8, 64, 64), (64, 2, 64), (64, 64, 4)])
def test_a_full_cache_is_emptied(sizes: tuple[int, int, int]) -> None:
    words = [bytes([97 + k, 98, 99]) for k in range(20)]
    cache = word_table(*sizes)
    for _ in range(2):
        assert encode(words, merge_table([]), cache)[0] == [byte for word in words for byte in word]
    assert 2 * cache.used[0] <= sizes[0]
