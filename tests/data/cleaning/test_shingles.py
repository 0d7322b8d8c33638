"""megatron/data/cleaning/shingles.py against Python's sets of word n-grams."""

import random

import numpy as np
import pytest

from megatron.data.cleaning.shingles import hashes_in_order, jaccard, shingle_hashes, signature

SPACES = "".join(chr(code) for code in range(0x110000) if chr(code).isspace())


def shingles(text: str, words: int = 5) -> list[tuple[str, ...]]:
    split = text.split()
    length = min(words, len(split))
    return [tuple(split[i : i + length]) for i in range(len(split) - length + 1)] if split else []


def random_text(source: random.Random, words: int) -> str:
    alphabet = "aé漢\u00a1\u2013\u2030\u3001😀"
    return "".join(
        "".join(source.choices(alphabet, k=source.randrange(1, 4))) + source.choice(SPACES) for _ in range(words)
    )


@pytest.mark.parametrize("words", [1, 5, 13])
def test_shingles_are_those_of_split(words):
    source = random.Random(0)
    text = random_text(source, 800)
    expected = shingles(text, words)
    hashes = hashes_in_order(text, words).tolist()
    assert len(hashes) == len(expected)
    names: dict[int, tuple[str, ...]] = {}
    for value, shingle in zip(hashes, expected, strict=True):
        assert names.setdefault(value, shingle) == shingle
    assert len(names) == len(set(expected))


@pytest.mark.parametrize("text", ["", " \n", "one", "a b c d", "a b c d e", "b a"])
def test_short_texts(text):
    assert shingle_hashes(text).size == len(set(shingles(text)))
    assert shingle_hashes(f" {text}\u3000").tolist() == shingle_hashes(text).tolist()


def test_order_of_words_counts():
    assert shingle_hashes("a b c d e") != shingle_hashes("b a c d e")
    assert shingle_hashes("a b") != shingle_hashes("ab")


def test_jaccard_and_its_estimate():
    source = random.Random(1)
    words = [str(source.random()) for _ in range(400)]
    errors = []
    for changed in (0, 1, 4, 10, 30, 100):
        other = words[:]
        for place in source.sample(range(400), changed):
            other[place] = str(source.random())
        texts = " ".join(words), " ".join(other)
        one, two = (set(shingles(text)) for text in texts)
        exact = len(one & two) / len(one | two)
        assert jaccard(*map(shingle_hashes, texts)) == pytest.approx(exact, abs=1e-12)
        errors.append(np.mean(signature(texts[0], 2048) == signature(texts[1], 2048)) - exact)
    assert errors[0] == 0 and np.abs(errors).max() < 4 * 0.5 / 2048**0.5
    assert jaccard(shingle_hashes(""), shingle_hashes(" ")) == 1
    assert jaccard(shingle_hashes(""), shingle_hashes("a")) == 0
