"""megatron/data/tokenizer/word_scanners.py: words end where the `tokenizers` library's expressions end them."""

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tricky_text import TRICKY, texts

from megatron.data.tokenizer.byte_level import MAX_DIGITS_OF_PATTERN, classes_of_code_points
from megatron.data.tokenizer.word_scanners import cut_cl100k, cut_gpt2

PATTERNS = list(MAX_DIGITS_OF_PATTERN)
NAMES = ["gpt2", "cl100k-1", "cl100k-2", "cl100k-3"]
ASSIGNED = [*range(0x20, 0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200), *range(0x10FFF0, 0x110000)]


def cut(batch, pattern):
    """Words of each text."""
    encoded = [text.encode() for text in batch]
    bounds = np.cumsum([0, *map(len, encoded)])
    joined = b"".join(encoded)
    ends, counts = np.empty(len(joined), np.int32), np.empty(len(batch), np.int64)
    text = np.frombuffer(joined + bytes(8), np.uint8)
    digits = MAX_DIGITS_OF_PATTERN[pattern]
    if digits == 0:
        total = cut_gpt2(text, bounds, classes_of_code_points(), ends, counts)
    else:
        total = cut_cl100k(text, bounds, classes_of_code_points(), digits, ends, counts)
    starts = [0, *ends[: total - 1]] if total else []
    words = [joined[start:end].decode() for start, end in zip(starts, ends[:total], strict=True)]
    return [words[end - count : end] for end, count in zip(np.cumsum(counts), counts, strict=True)]


def library_words(text, pattern):
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return [word for word, _ in split.pre_tokenize_str(text)]


@pytest.mark.fast("gpt2", "cl100k-3")
@pytest.mark.parametrize("pattern", PATTERNS, ids=NAMES)
def test_random_text(pattern):
    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(st.lists(texts, max_size=3))
    @example(["'ſx", "'ſ's'S'lL'LLx'", "a  b", "a \n b", " \n\n  x", "   ", "'", "'l", "1234 5"])
    @example(["\n".join(TRICKY), "".join(TRICKY), " ".join(TRICKY), "a".join(TRICKY), "'".join(TRICKY)])
    def check(batch):
        assert cut(batch, pattern) == [library_words(text, pattern) for text in batch]

    check()


@pytest.mark.slow
@pytest.mark.slow_cases("gpt2")
@pytest.mark.parametrize("pattern", [PATTERNS[0], PATTERNS[-1]], ids=["gpt2", "cl100k"])
def test_every_character(pattern):
    """Each code point beside a letter, a digit, a sign and a blank."""
    text = "".join(f"a{chr(p)}1{chr(p)}!{chr(p)} {chr(p)}" for p in ASSIGNED)
    pieces = [text[k : k + 9000] for k in range(0, len(text), 9000)]
    assert cut(pieces, pattern) == [library_words(piece, pattern) for piece in pieces]


@pytest.mark.parametrize("pattern", PATTERNS, ids=NAMES)
def test_contractions_in_any_case(pattern):
    batch = [f"a'{one}{two}b" for one in "sStTmMdDrRvVlLſkK" for two in ["", *"eElLsſ1 '"]]
    assert cut(batch, pattern) == [library_words(text, pattern) for text in batch]
