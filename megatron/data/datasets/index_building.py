"""The three indices of a GPT dataset, which map samples to tokens, in Megatron-LM's order.

All sequences of a split, repeated for the required number of epochs, are shuffled (document index) and concatenated.
This stream is cut every `sequence_length` tokens (sample index), and the cuts are shuffled (shuffle index). One numpy
RandomState, seeded once, draws the document shuffle and then the sample shuffle.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron.core.exceptions import UserError
from megatron.core.utils.compiled import compiled

# The last epoch is shuffled separately if less than this fraction of its samples is used. Otherwise some documents of
# the other epochs would be left out in favor of the last one's.
_SEPARATE_BELOW = 0.80

_DOCUMENTS_AT_ONCE = 1 << 20
_WORDS_AT_ONCE = 1 << 20
_MOST_DRAWN = 1 << 32
"""A word of the random numbers chooses one of so many values at most."""


@dataclass(frozen=True)
class SamplePlan:
    """The numbers that determine the three indices."""

    num_epochs: int
    """Number of times that the stream contains the split's sequences."""
    num_samples: int
    """Number of samples in the stream, which may be more than requested."""
    samples_before_last_epoch: int | None
    """Number of samples before the last epoch, if the last epoch is shuffled separately; otherwise None."""
    sequence_length: int
    extra_tokens: int
    """Number of tokens that a sample shares with the next one: 1 if labels are tokens shifted by one, otherwise 0."""


@dataclass(frozen=True)
class SampleIndices:
    """The three indices. Sample i begins at row shuffle_index[i] of sample_index and ends at the next row."""

    document_index: np.ndarray
    """int32 [num_epochs * sequences]: sequence ids in the order of the stream."""
    sample_index: np.ndarray
    """[num_samples + 1, 2]: (position in document_index, token offset in that sequence) of each sample's begin."""
    shuffle_index: np.ndarray
    """uint32 or int64 [num_samples]: a permutation of the samples."""


def plan_samples(
    tokens_per_epoch: int,
    num_samples: int | None,
    sequence_length: int,
    extra_tokens: int,
    drop_last_partial: bool = True,
) -> SamplePlan:
    """Returns the number of epochs that `num_samples` samples need (None: one epoch), and the samples in these epochs.

    With `drop_last_partial` False, a last sample with fewer tokens is kept. `tokens_per_epoch` must be positive.
    """
    assert tokens_per_epoch > 0, "empty splits are refused earlier"
    needed = 0 if num_samples is None else num_samples * sequence_length + extra_tokens
    num_epochs = max(1, -(-needed // tokens_per_epoch))
    tokens = num_epochs * tokens_per_epoch - extra_tokens
    held = tokens // sequence_length if drop_last_partial else -(-tokens // sequence_length)
    apart = None
    if num_epochs > 1:
        assert num_samples is not None
        before = (tokens - tokens_per_epoch) // sequence_length
        per_epoch = (tokens_per_epoch - extra_tokens) // sequence_length
        used_of_last = num_samples - before
        assert 0 <= used_of_last <= per_epoch + 1
        apart = before if used_of_last < int(_SEPARATE_BELOW * per_epoch) else None
    return SamplePlan(num_epochs, held, apart, sequence_length, extra_tokens)


def build_indices(
    sequence_ids: Sequence[int] | np.ndarray, sequence_lengths: np.ndarray, plan: SamplePlan, seed: int
) -> SampleIndices:
    """Builds the three indices of the split that consists of the sequences `sequence_ids`.

    `sequence_lengths` has the lengths of all sequences of the dataset, by id. Raises UserError if this machine's memory
    is smaller than the indices.
    """
    _refuse_beyond_memory(plan, len(sequence_ids))
    random = np.random.RandomState(seed)
    document_index = build_document_index(sequence_ids, plan, random)
    sample_index = build_sample_index(sequence_lengths, document_index, plan)
    return SampleIndices(document_index, sample_index, build_shuffle_index(plan, random))


def _refuse_beyond_memory(plan: SamplePlan, sequences: int) -> None:
    needed = 4 * plan.num_epochs * sequences + 12 * plan.num_samples
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise UserError(
            f"{plan.num_samples} samples in {plan.num_epochs} epochs: the indices of their order take "
            f"{needed / 1e9:,.1f} GB, and this machine has {present / 1e9:,.1f} GB of memory; give a smaller "
            "--train-iters, --train-samples or --eval-iters"
        )


def build_document_index(
    sequence_ids: Sequence[int] | np.ndarray, plan: SamplePlan, random: np.random.RandomState
) -> np.ndarray:
    """Returns the shuffled sequence ids of all epochs. The last epoch is shuffled separately if the plan says so."""
    if isinstance(sequence_ids, range):  # np.asarray would make a Python integer of each
        one_epoch = np.arange(sequence_ids.start, sequence_ids.stop, sequence_ids.step, dtype=np.int32)
    else:
        one_epoch = np.asarray(sequence_ids, dtype=np.int32)
    if plan.samples_before_last_epoch is None:
        stages = [np.tile(one_epoch, plan.num_epochs)]
    else:
        stages = [np.tile(one_epoch, plan.num_epochs - 1), one_epoch.copy()]
    for stage in stages:
        shuffle(stage, random)
    return stages[0] if len(stages) == 1 else np.concatenate(stages)


def build_sample_index(sequence_lengths: np.ndarray, document_index: np.ndarray, plan: SamplePlan) -> np.ndarray:
    """Returns the sample index, [num_samples + 1, 2]; int32 if all entries fit, otherwise int64."""
    largest = max(len(document_index), int(sequence_lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    cuts = np.zeros((plan.num_samples + 1, 2), dtype)
    progress = np.array([1, 0, plan.sequence_length])
    starts = range(0, len(document_index), _DOCUMENTS_AT_ONCE)

    def lengths_from(start: int) -> np.ndarray:
        return _gather(sequence_lengths, document_index[start : start + _DOCUMENTS_AT_ONCE])

    # Each access in shuffled order misses the cache. Several threads wait for memory at the same time.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        gathered = pool.map(lengths_from, starts) if len(starts) > 1 else map(lengths_from, starts)
        for start, lengths in zip(starts, gathered, strict=True):
            _cut_stream(lengths, start, plan.sequence_length, plan.extra_tokens, progress, cuts)
    if progress[0] < len(cuts):  # the last sample is partial
        cuts[-1] = len(document_index) - 1, sequence_lengths[document_index[-1]] - plan.extra_tokens
    return cuts


def build_shuffle_index(plan: SamplePlan, random: np.random.RandomState) -> np.ndarray:
    """Returns a permutation of the samples. If the last epoch is shuffled separately, its samples stay at the end."""
    dtype = np.uint32 if plan.num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(plan.num_samples, dtype=dtype)
    boundary = plan.num_samples if plan.samples_before_last_epoch is None else plan.samples_before_last_epoch
    for part in (order[:boundary], order[boundary:]):
        shuffle(part, random)
    return order


def shuffle(values: np.ndarray, random: np.random.RandomState) -> None:
    """Shuffles `values` [n] in place. The result and the state of `random` afterwards equal those of `random.shuffle`,
    bit for bit, but it takes less than half of the time. More than 2^32 values are left to `random.shuffle`.

    The algorithm is Fisher-Yates from the last element down. For element i, numpy draws words of the Mersenne Twister,
    cut to the number of bits of i, until a word is at most i; this word is the position to swap with.
    """
    if len(values) > _MOST_DRAWN:
        random.shuffle(values)
        return
    first = len(values) - 1
    while first > 0:
        before = random.get_state()
        words = random.randint(0, 1 << 32, size=min(2 * first, _WORDS_AT_ONCE), dtype=np.uint32)
        first, used = _swap(values, first, words)
    if len(values) > 1:
        random.set_state(before)
        random.randint(0, 1 << 32, size=used, dtype=np.uint32)  # leaves the words that were not used to others


@compiled
def _swap(values: np.ndarray, first: int, words: np.ndarray) -> tuple[int, int]:
    """Swaps elements first, first - 1, ... 1 with the elements that `words` choose, until elements or words are used
    up.

    Returns the element that is next, and the number of words that were used.
    """
    mask = np.uint32(1)
    while mask < first:
        mask = np.uint32(mask << 1 | 1)
    for used in range(words.shape[0]):
        place = words[used] & mask
        if place <= first:
            values[first], values[place] = values[place], values[first]
            first -= 1
            if first == 0:
                return 0, used + 1
            if first <= mask >> 1:
                mask = np.uint32(mask >> 1)
    return first, words.shape[0]


@compiled
def _gather(sequence_lengths: np.ndarray, sequence_ids: np.ndarray) -> np.ndarray:
    lengths = np.empty(sequence_ids.shape[0], np.int64)
    for i in range(sequence_ids.shape[0]):
        lengths[i] = sequence_lengths[sequence_ids[i]]
    return lengths


@compiled
def _cut_stream(
    lengths: np.ndarray,
    first_entry: int,
    sequence_length: int,
    extra_tokens: int,
    progress: np.ndarray,
    cuts: np.ndarray,
) -> None:
    """Fills the rows of `cuts` that belong to the next sequences of the stream, which have these `lengths`.

    `progress` is [next row, tokens before these sequences, tokens before the next cut] and is updated. Cut k is
    k * sequence_length tokens into the stream. It belongs to the sequence with the last token of sample k - 1, so
    without extra tokens it may be at the end of a sequence.
    """
    row, begin, cut = progress
    for i in range(lengths.shape[0]):
        end = begin + lengths[i]
        while cut + extra_tokens <= end and row < cuts.shape[0]:
            cuts[row, 0] = first_entry + i
            cuts[row, 1] = cut - begin
            row += 1
            cut += sequence_length
        begin = end
    progress[0], progress[1], progress[2] = row, begin, cut
