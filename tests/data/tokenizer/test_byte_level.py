"""megatron/data/tokenizer/byte_level.py: ids equal to the `tokenizers` library's, for any text and any merges."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tricky_text import TRICKY, texts

from megatron.data.tokenizer import byte_level
from megatron.data.tokenizer.byte_level import MAX_DIGITS_OF_PATTERN, ByteLevelEncoder, printable_bytes

CORPUS = Path(__file__).parents[2] / "data/golden/corpus"
PATTERNS = list(MAX_DIGITS_OF_PATTERN)
NAMES = ["gpt2", "cl100k-1", "cl100k-2", "cl100k-3"]


def golden_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocab = json.loads((CORPUS / "gpt2bpe/vocab.json").read_text())
    lines = (CORPUS / "gpt2bpe/merges.txt").read_text().splitlines()[1:]
    return vocab, [tuple(line.split(" ")) for line in lines]


def random_bpe(seed: int, merges: int = 300) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary in random order whose merges no training would give, so that ids are no ranks."""
    random = np.random.default_rng(seed)
    tokens = list(printable_bytes().values())
    common = [printable_bytes()[byte] for byte in b" etaoins'\n0123.\xc3\xa9\xe4\xbd\xa0"]
    pairs: dict[tuple[str, str], None] = {}
    while len(pairs) < merges:
        left, right = (common[random.integers(len(common))] for _ in range(2))
        if tokens[256:] and random.random() < 0.6:
            left = tokens[random.integers(256, len(tokens))]
        if tokens[256:] and random.random() < 0.3:
            right = tokens[random.integers(256, len(tokens))]
        if len(left + right) < 12 and (left, right) not in pairs:
            pairs[left, right] = None
            if left + right not in tokens:
                tokens.append(left + right)
    order = random.permutation(len(tokens))
    return {token: int(i) for token, i in zip(tokens, order, strict=True)}, list(pairs)


def library(vocab, merges, pattern, ignore_merges=False) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    as_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, as_bytes])
    return made


def assert_same_ids(encoder, reference, batch):
    encoded = encoder.encode(batch)
    expected = [reference.encode(text, add_special_tokens=False).ids for text in batch]
    assert encoded.ids.dtype == np.int32
    assert encoded.lengths.tolist() == [len(ids) for ids in expected]
    assert encoded.ids.tolist() == [i for ids in expected for i in ids]


@pytest.mark.fast("golden-gpt2", "random-cl100k-2")
@pytest.mark.parametrize("pattern", PATTERNS, ids=NAMES)
@pytest.mark.parametrize("bpe", ["golden", "random"])
def test_random_text(bpe, pattern):
    vocab, merges = golden_bpe() if bpe == "golden" else random_bpe(7)
    encoder, reference = ByteLevelEncoder(vocab, merges, pattern), library(vocab, merges, pattern)

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(st.lists(texts, max_size=4))
    @example(["", "", " ", "\n"])
    @example(["'ſ's'S'lL'LLx", "a  b", "a \n b", " \n\n  x", "   "])
    def check(batch):
        assert_same_ids(encoder, reference, batch)

    check()


@pytest.mark.parametrize("seed", range(5))
def test_any_merges(seed):
    vocab, merges = random_bpe(seed, merges=500)
    encoder = ByteLevelEncoder(vocab, merges)
    alphabet = np.array(list(" etaoins'\n0123.é你"))
    batch = ["".join(np.random.default_rng(seed).choice(alphabet, 5000))]
    assert_same_ids(encoder, library(vocab, merges, byte_level.GPT2_PATTERN), batch)


def test_gpt2_pattern_is_the_librarys_own():
    vocab, merges = golden_bpe()
    reference = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert_same_ids(ByteLevelEncoder(vocab, merges), reference, ["".join(TRICKY), " ".join(TRICKY), *TRICKY])


def test_whole_words_first():
    vocab, merges = random_bpe(3)
    vocab["Ġtea"] = len(vocab)  # a token that no merges give
    encoder = ByteLevelEncoder(vocab, merges, PATTERNS[-1], whole_words_first=True)
    reference = library(vocab, merges, PATTERNS[-1], ignore_merges=True)
    assert_same_ids(encoder, reference, ["tea tea tea", " teas tea", "noise on tea  tea\n tea"])
    assert vocab["Ġtea"] in encoder.encode([" tea"]).ids


@pytest.mark.slow_cases("word1")
@pytest.mark.parametrize("word", ["e" * 65, "eta" * 100_000, " " * 5000, "1" * 999, "é" * 70_000])
def test_long_words(word):
    vocab, merges = random_bpe(11)
    assert_same_ids(
        ByteLevelEncoder(vocab, merges), library(vocab, merges, byte_level.GPT2_PATTERN), [word, "x" + word]
    )


def test_a_pair_that_has_changed_is_not_merged_early():
    """In "abcd" b and c merge first; what was queued for a and b then says nothing about a and bc."""
    tokens = [*printable_bytes().values(), "ab", "bc", "abc", "bcd"]
    merges = [("b", "c"), ("a", "b"), ("bc", "d"), ("a", "bc")]
    vocab = {token: i for i, token in enumerate(tokens)}
    encoder = ByteLevelEncoder(vocab, merges)
    assert encoder.encode(["abcd"]).ids.tolist() == [vocab["a"], vocab["bcd"]]
    assert_same_ids(encoder, library(vocab, merges, byte_level.GPT2_PATTERN), ["abcd", "abcdabcab"])


def test_a_pair_that_occurs_twice_has_its_later_rank():
    tokens = [*printable_bytes().values(), "ab", "bc"]
    vocab, merges = {token: i for i, token in enumerate(tokens)}, [("a", "b"), ("b", "c"), ("a", "b")]
    encoder = ByteLevelEncoder(vocab, merges)
    assert encoder.encode(["abc"]).ids.tolist() == [vocab["a"], vocab["bc"]]
    assert_same_ids(encoder, library(vocab, merges, byte_level.GPT2_PATTERN), ["abc", "ab"])


def test_words_that_begin_alike(monkeypatch):
    """In a small table many of them meet in one slot, where only the rest of their bytes tells them apart."""
    monkeypatch.setattr(byte_level, "_CACHED_WORDS", 200)
    vocab, merges = golden_bpe()
    words = [f"eightlet{middle}{end}" for middle in "abcdefghijklmnopqrstuvwxyz" for end in ("", "xyzuvwas", "q" * 40)]
    encoder, reference = ByteLevelEncoder(vocab, merges), library(vocab, merges, byte_level.GPT2_PATTERN)
    for _ in range(2):
        assert_same_ids(encoder, reference, ["\n".join(words)])


def test_a_full_cache_is_emptied(monkeypatch):
    monkeypatch.setattr(byte_level, "_CACHED_WORDS", 16)
    vocab, merges = golden_bpe()
    encoder, reference = ByteLevelEncoder(vocab, merges), library(vocab, merges, byte_level.GPT2_PATTERN)
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("etaoinshr"), random.integers(1, 20))) for _ in range(300)]
    for _ in range(3):
        assert_same_ids(encoder, reference, [" ".join(random.permutation(words))])


def test_survives_pickling():
    vocab, merges = golden_bpe()
    encoder = ByteLevelEncoder(vocab, merges)
    encoder.encode(["The first"])
    again = pickle.loads(pickle.dumps(encoder))
    assert again.encode(["The first", "year"]).ids.tolist() == encoder.encode(["The first", "year"]).ids.tolist()


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(UnicodeEncodeError):
        ByteLevelEncoder(*golden_bpe()).encode(["ok", "\ud83d"])


def test_incomplete_vocabularies():
    vocab, _ = golden_bpe()
    with pytest.raises(ValueError, match="'Ġzz'"):
        ByteLevelEncoder(vocab, [("Ġzz", "t")])
    del vocab["Ġ"]
    with pytest.raises(ValueError, match="1 bytes have no token, the first is 0x20"):
        ByteLevelEncoder(vocab, [])
