"""The sample map of BERT and T5 datasets: the sentences of each sample, in Megatron-LM's order.

Each epoch walks through the documents of a split and packs consecutive sentences of a document until they reach a
target length, which is sometimes drawn shorter. The samples of all epochs are then shuffled. A 32-bit Mersenne Twister
draws the lengths and a 64-bit one the shuffle (Matsumoto & Nishimura 1998; Nishimura 2000), as in C++'s <random>.
"""

import math
from dataclasses import dataclass

import numpy as np

from megatron.core.utils.compiled import compiled, compiled_inline

LONGEST_SENTENCE = 512
"""A document of several sentences is left out if one of them has more tokens than this."""

_MOST_EPOCHS = 2**31 - 2
_UNLIMITED = 2**63 - 1


@dataclass(frozen=True)
class SampleMapPlan:
    """The numbers that, together with the sentences, determine a sample map."""

    num_samples: int | None
    """Number of samples requested; None: one epoch. The last epoch is always finished, so the map may have more
    samples."""
    max_tokens: int
    """Largest number of tokens of a sample, without special tokens; at least 2."""
    min_sentences: int
    """Documents with fewer sentences are left out, and a sample ends only after this many."""
    short_sequence_probability: float
    """Fraction of the samples that are shorter, with a length from 2 to `max_tokens`."""
    seed: int


@dataclass(frozen=True)
class UsableDocuments:
    """The documents of a split from which samples are made."""

    usable: np.ndarray
    """bool [documents]."""
    too_few_sentences: int
    """Number of documents, not empty, with fewer sentences than a sample needs."""
    too_long_sentence: int
    """Number of documents with enough sentences, one of which is longer than LONGEST_SENTENCE."""


@dataclass(frozen=True)
class SampleMap:
    """The samples of a split."""

    rows: np.ndarray
    """[samples, 3]: first sentence, sentence after the last, target length in tokens. uint32, or uint64 for more than
    2^32 - 1 sentences."""
    num_tokens: int
    """Number of tokens in the sentences of all samples."""
    cut_tokens: int
    """Number of them beyond the target length of their sample."""
    num_epochs: int
    """Number of times that the samples walk through the documents."""


def find_usable_documents(boundaries: np.ndarray, lengths: np.ndarray, min_sentences: int) -> UsableDocuments:
    """Finds the documents of a split that samples can be made from.

    `boundaries`, int64 [documents + 1], has the first sentence of each document and the end of the last. `lengths` has
    the tokens of all sentences of the dataset, by id.
    """
    usable = np.zeros(len(boundaries) - 1, np.bool_)
    too_few, too_long = _mark_usable(boundaries, lengths, min_sentences, usable)
    return UsableDocuments(usable, too_few, too_long)


def build_sample_map(boundaries: np.ndarray, lengths: np.ndarray, usable: np.ndarray, plan: SampleMapPlan) -> SampleMap:
    """Returns the sample map of a split. Without usable documents it has no samples."""
    assert plan.max_tokens >= 2, "shorter sequences are refused earlier"
    rows = np.empty((0, 3), np.uint64 if len(lengths) > np.iinfo(np.uint32).max else np.uint32)
    if not usable.any():
        return SampleMap(rows, 0, 0, 0)
    wanted, most_epochs = (_UNLIMITED, 1) if plan.num_samples is None else (plan.num_samples, _MOST_EPOCHS)
    numbers = (plan.min_sentences, plan.max_tokens, _short_ratio(plan.short_sequence_probability), plan.seed)
    arguments = (boundaries, lengths, usable, *numbers, wanted, most_epochs)
    count, tokens, cut, epochs = _pack_sentences(*arguments, rows)
    rows = np.empty((count, 3), rows.dtype)
    _pack_sentences(*arguments, rows)
    _shuffle_rows(rows, plan.seed + 1)
    return SampleMap(rows, tokens, cut, epochs)


def _short_ratio(probability: float) -> int:
    """Returns n, where one of n samples is drawn shorter; 0 if none is. Halves are rounded up, as in C."""
    return 0 if probability == 0 else math.floor(1.0 / probability + 0.5)


@compiled
def _mark_usable(
    boundaries: np.ndarray, lengths: np.ndarray, min_sentences: int, usable: np.ndarray
) -> tuple[int, int]:
    too_few, too_long = 0, 0
    for document in range(usable.shape[0]):
        first, end = boundaries[document], boundaries[document + 1]
        if end - first < min_sentences:
            too_few += end > first
            continue
        longest = 0
        for sentence in range(first, end):
            longest = max(longest, lengths[sentence])
        if end - first > 1 and longest > LONGEST_SENTENCE:
            too_long += 1
        else:
            usable[document] = end > first
    return too_few, too_long


@compiled
def _pack_sentences(
    boundaries: np.ndarray,
    lengths: np.ndarray,
    usable: np.ndarray,
    min_sentences: int,
    max_tokens: int,
    short_ratio: int,
    seed: int,
    num_samples: int,
    most_epochs: int,
    rows: np.ndarray,
) -> tuple[int, int, int, int]:
    """Returns the numbers of samples, of their tokens, of tokens that are cut off, and of epochs. Writes the samples
    into `rows` unless it is empty."""
    twister = _seeded_32(seed)
    writes = rows.shape[0] > 0
    row, all_tokens, cut, epochs = 0, 0, 0, 0
    while epochs < most_epochs and row < num_samples:
        epochs += 1
        for document in range(usable.shape[0]):
            if not usable[document]:
                continue
            first, end = boundaries[document], boundaries[document + 1]
            target = _draw_target(twister, max_tokens, short_ratio)
            tokens, sentences = 0, 0
            for sentence in range(first, end):
                tokens += lengths[sentence]
                sentences += 1
                remaining = end - sentence - 1
                if (tokens >= target and remaining > 1 and sentences >= min_sentences) or remaining == 0:
                    if writes:
                        rows[row, 0] = first
                        rows[row, 1] = sentence + 1
                        rows[row, 2] = target
                    row += 1
                    all_tokens += tokens
                    cut += max(0, tokens - target)
                    first = sentence + 1
                    target = _draw_target(twister, max_tokens, short_ratio)
                    tokens, sentences = 0, 0
    return row, all_tokens, cut, epochs


@compiled
def _draw_target(twister: np.ndarray, max_tokens: int, short_ratio: int) -> int:
    """Returns the target length of the next sample. Draws nothing if samples are never shorter."""
    if short_ratio == 0:
        return max_tokens
    drawn = int(_draw_32(twister))
    if drawn % short_ratio == 0:
        return 2 + drawn % (max_tokens - 1)
    return max_tokens


@compiled
def _shuffle_rows(rows: np.ndarray, seed: int) -> None:
    """Shuffles the rows in place (Fisher-Yates, from the last row to the second)."""
    twister = _seeded_64(seed)
    for i in range(rows.shape[0] - 1, 0, -1):
        j = np.int64(_draw_64(twister) % np.uint64(i + 1))
        for column in range(3):
            kept = rows[i, column]
            rows[i, column] = rows[j, column]
            rows[j, column] = kept


# ---------------------------------------------------------------------------------------------------------------------
# Mersenne Twisters. The state is an array of words; the last entry is the number of words used of the current block.
# All operands are uint64: mixed with Python's integers, numba would compute in floating point.

_SIZE_32, _SHIFT_32 = 624, 397
_SIZE_64, _SHIFT_64 = 312, 156
_ONE = np.uint64(1)
_LOW_32 = np.uint64(0xFFFFFFFF)
_UPPER_32, _LOWER_32, _TWIST_32 = np.uint64(0x80000000), np.uint64(0x7FFFFFFF), np.uint64(0x9908B0DF)
_UPPER_64, _LOWER_64 = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_TWIST_64 = np.uint64(0xB5026F5AA96619E9)
_SEEDING_32, _SEEDING_64 = np.uint64(1812433253), np.uint64(6364136223846793005)
_TEMPER_32 = (np.uint64(0x9D2C5680), np.uint64(0xEFC60000))
_TEMPER_64 = (np.uint64(0x5555555555555555), np.uint64(0x71D67FFFEDA60000), np.uint64(0xFFF7EEE000000000))


@compiled
def _seeded_32(seed: int) -> np.ndarray:
    state = np.empty(_SIZE_32 + 1, np.uint64)
    state[0] = np.uint64(seed) & _LOW_32
    for i in range(1, _SIZE_32):
        before = state[i - 1]
        state[i] = (_SEEDING_32 * (before ^ (before >> np.uint64(30))) + np.uint64(i)) & _LOW_32
    state[_SIZE_32] = _SIZE_32
    return state


@compiled
def _seeded_64(seed: int) -> np.ndarray:
    state = np.empty(_SIZE_64 + 1, np.uint64)
    state[0] = np.uint64(seed)
    for i in range(1, _SIZE_64):
        before = state[i - 1]
        state[i] = _SEEDING_64 * (before ^ (before >> np.uint64(62))) + np.uint64(i)
    state[_SIZE_64] = _SIZE_64
    return state


@compiled
def _refill(state: np.ndarray, size: int, shift: int, upper: np.uint64, lower: np.uint64, twist: np.uint64) -> None:
    """Computes the next block of words."""
    for i in range(size):
        mixed = (state[i] & upper) | (state[(i + 1) % size] & lower)
        word = state[(i + shift) % size] ^ (mixed >> _ONE)
        if mixed & _ONE:
            word ^= twist
        state[i] = word
    state[size] = 0


@compiled_inline
def _draw_32(state: np.ndarray) -> np.uint64:
    """Returns the next number of mt19937, below 2^32."""
    if state[_SIZE_32] == _SIZE_32:
        _refill(state, _SIZE_32, _SHIFT_32, _UPPER_32, _LOWER_32, _TWIST_32)
    word = state[np.int64(state[_SIZE_32])]
    state[_SIZE_32] += _ONE
    word ^= word >> np.uint64(11)
    word ^= (word << np.uint64(7)) & _TEMPER_32[0]
    word ^= (word << np.uint64(15)) & _TEMPER_32[1]
    return word ^ (word >> np.uint64(18))


@compiled_inline
def _draw_64(state: np.ndarray) -> np.uint64:
    """Returns the next number of mt19937_64, below 2^64."""
    if state[_SIZE_64] == _SIZE_64:
        _refill(state, _SIZE_64, _SHIFT_64, _UPPER_64, _LOWER_64, _TWIST_64)
    word = state[np.int64(state[_SIZE_64])]
    state[_SIZE_64] += _ONE
    word ^= (word >> np.uint64(29)) & _TEMPER_64[0]
    word ^= (word << np.uint64(17)) & _TEMPER_64[1]
    word ^= (word << np.uint64(37)) & _TEMPER_64[2]
    return word ^ (word >> np.uint64(43))
