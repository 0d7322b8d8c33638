"""megatron/data/datasets/masking.py: which spans are masked."""

import itertools

import numpy as np
import pytest

from megatron.data.datasets.masking import MaskingRule, _RunLengths, draw_spans, words_of


def test_words_are_runs_of_pieces_between_special_tokens():
    continues = np.array([0, 1, 0, 1, 1, 0, 0, 1, 0], bool)
    special = np.array([1, 0, 0, 0, 0, 0, 1, 0, 1], bool)
    # The first token continues nothing; the one after a special token continues the word before it.
    assert words_of(continues, special) == [[1], [2, 3, 4], [5, 7]]


@pytest.mark.parametrize("longer", [False, True])
def test_run_lengths_are_those_of_choice(longer):
    weights = 1.0 / np.arange(1, 6)
    shares = weights / weights.sum()
    rule = MaskingRule(0.15, 5, geometric=False, longer_ngrams=longer)
    mine, theirs = np.random.RandomState(3), np.random.RandomState(3)
    lengths = _RunLengths(rule, mine)
    drawn = [lengths.draw() for _ in range(300)]
    assert drawn == [theirs.choice(np.arange(1, 6), p=shares[::-1] if longer else shares) for _ in range(300)]
    assert mine.random_sample() == theirs.random_sample()
    assert set(drawn) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_runs_of_whole_words_and_not_too_many_tokens(seed):
    random = np.random.RandomState(seed)
    continues = random.random_sample(80) < 0.4
    words = words_of(continues, np.zeros(80, bool))
    rule = MaskingRule(0.3, 4, geometric=seed % 2 == 0)
    most = rule.count(80, 80)
    spans = list(draw_spans(words, most, rule, random))
    masked = [position for span in spans for position in span]
    assert len(set(masked)) == len(masked) <= most == 24
    for span in spans:
        inside = [word for word in words if word[0] in span]
        assert list(itertools.chain(*inside)) == span and 1 <= len(inside) <= 4
    assert len(masked) >= most - max(map(len, words))


def test_numbers_of_masked_tokens():
    rule = MaskingRule(0.15, 3, geometric=False)
    assert rule.count(100, 509) == 15 and rule.count(3, 509) == 1
    assert rule.count(512, 509) == 0.15 * 509  # not rounded
    assert not list(draw_spans([[0], [1]], rule.count(5, 2), rule, np.random.RandomState(0)))
