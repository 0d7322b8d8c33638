"""Which tokens of a sample are masked: words in runs of random length, in Megatron-LM's order of random draws."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_CONTINUES_GEOMETRICALLY = 0.2


@dataclass(frozen=True)
class MaskingRule:
    """How the runs of masked words are chosen."""

    probability: float
    """Fraction of the tokens that are masked."""
    max_ngram: int
    """Longest run, in words."""
    geometric: bool
    """Draw the length of a run from a geometric distribution, so that long runs occur; False: a run of n words has a
    weight of 1/n."""
    longer_ngrams: bool = False
    """Give the weights 1/n in reverse, so that longer runs are more frequent."""

    def count(self, num_tokens: int, target: int) -> float:
        """Returns the largest number of masked tokens in a sample of `num_tokens` tokens, special tokens included,
        that was made for `target` tokens."""
        return min(self.probability * target, max(1, round(num_tokens * self.probability)))


def words_of(continues: np.ndarray, special: np.ndarray) -> list[list[int]]:
    """Returns the words of a sample, each a list of positions.

    `continues` and `special`, bool [tokens], are True for tokens that continue a word and for tokens outside words.
    """
    words: list[list[int]] = []
    for position in np.flatnonzero(~special).tolist():
        if continues[position] and words:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def draw_spans(
    words: list[list[int]], most: float, rule: MaskingRule, random: np.random.RandomState
) -> Iterator[list[int]]:
    """Yields the spans to mask, each a list of token positions, in random order.

    Visits the words in random order, draws the length of a run that begins there, and shortens it until the number of
    masked tokens is at most `most`. Skips runs that overlap earlier ones. The caller may draw from `random` in between.
    """
    lengths = _RunLengths(rule, random)
    order = np.arange(len(words))
    random.shuffle(order)
    masked: set[int] = set()
    for start in order.tolist():
        if len(masked) + 1 > most:
            return
        length = lengths.draw()
        span = _join(words, start, length)
        while len(masked) + len(span) > most and length > 1:
            length -= 1
            span = _join(words, start, length)
        if len(masked) + len(span) <= most and masked.isdisjoint(span):
            masked.update(span)
            yield span


def _join(words: list[list[int]], start: int, length: int) -> list[int]:
    return [position for word in words[start : start + length] for position in word]


class _RunLengths:
    """Draws lengths of runs, in words."""

    def __init__(self, rule: MaskingRule, random: np.random.RandomState) -> None:
        self._rule, self._random = rule, random
        weights = 1.0 / np.arange(1, rule.max_ngram + 1)
        shares = weights / weights.sum(keepdims=True)
        if rule.longer_ngrams:
            shares = shares[::-1]
        # RandomState.choice(p=...) computes this sum at each call, then draws one number.
        cumulative = shares.cumsum()
        self._cumulative = cumulative / cumulative[-1]

    def draw(self) -> int:
        if self._rule.geometric:
            return min(int(self._random.geometric(_CONTINUES_GEOMETRICALLY)), self._rule.max_ngram)
        return int(self._cumulative.searchsorted(self._random.random_sample(), side="right")) + 1
