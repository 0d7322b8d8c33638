"""Which tokens make which sample: the three indices of a GPT dataset, in the published order.

All sequences of a split, repeated for as many epochs as the samples need, are shuffled (document index) and laid end to
end; this stream is cut every `sequence_length` tokens (sample index), and the cuts are shuffled (shuffle index). One
numpy RandomState, seeded once, draws the document shuffle and then the sample shuffle, which fixes the order for good.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron.core.utils.compiled import compiled

# The last epoch is shuffled apart when fewer than this part of its samples is used: mixed in with the others, its
# documents would be seen less often than the rest.
_SEPARATE_BELOW = 0.80

_PIECE = 1 << 20  # documents handled at a time


@dataclass(frozen=True)
class SamplePlan:
    """The numbers that fix the three indices, before any of them is built."""

    num_epochs: int
    """Times that the split's sequences are laid into the stream."""
    num_samples: int
    """Samples that the stream holds; it may be more than were asked for."""
    samples_before_last_epoch: int | None
    """Where the last epoch is shuffled apart: the number of samples before it. None: all is shuffled together."""
    sequence_length: int
    extra_tokens: int
    """Tokens by which each sample reaches into the next one: 1 where labels are tokens shifted by one, else 0."""


@dataclass(frozen=True)
class SampleIndices:
    """Where sample i lies: row shuffle_index[i] of sample_index is its begin, the next row its end."""

    document_index: np.ndarray
    """int32 [num_epochs * sequences]: sequence ids in the order of the stream."""
    sample_index: np.ndarray
    """[num_samples + 1, 2]: (position in document_index, token offset in that sequence) of every cut."""
    shuffle_index: np.ndarray
    """uint32 or int64 [num_samples]."""


def plan_samples(
    tokens_per_epoch: int,
    num_samples: int | None,
    sequence_length: int,
    extra_tokens: int,
    drop_last_partial: bool = True,
) -> SamplePlan:
    """How many epochs `num_samples` need (None: one epoch, whatever it holds) and how many samples these hold.

    `drop_last_partial` False keeps a last sample of fewer tokens. tokens_per_epoch must be positive.
    """
    assert tokens_per_epoch > 0, "an empty split has no samples and is refused before this"
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
    """Build the three indices of the split that consists of `sequence_ids`.

    `sequence_lengths` are the lengths of all sequences of the dataset, by id.
    """
    random = np.random.RandomState(seed)
    document_index = build_document_index(sequence_ids, plan, random)
    sample_index = build_sample_index(sequence_lengths, document_index, plan)
    return SampleIndices(document_index, sample_index, build_shuffle_index(plan, random))


def build_document_index(
    sequence_ids: Sequence[int] | np.ndarray, plan: SamplePlan, random: np.random.RandomState
) -> np.ndarray:
    """All epochs' sequence ids, shuffled together, or the last epoch's apart from the others'."""
    if isinstance(sequence_ids, range):  # numpy would go through a Python integer for each
        one_epoch = np.arange(sequence_ids.start, sequence_ids.stop, sequence_ids.step, dtype=np.int32)
    else:
        one_epoch = np.asarray(sequence_ids, dtype=np.int32)
    if plan.samples_before_last_epoch is None:
        stages = [np.tile(one_epoch, plan.num_epochs)]
    else:
        stages = [np.tile(one_epoch, plan.num_epochs - 1), one_epoch.copy()]
    for stage in stages:
        random.shuffle(stage)
    return stages[0] if len(stages) == 1 else np.concatenate(stages)


def build_sample_index(sequence_lengths: np.ndarray, document_index: np.ndarray, plan: SamplePlan) -> np.ndarray:
    """The cuts of the stream, [num_samples + 1, 2]; int32 where every entry fits."""
    largest = max(len(document_index), int(sequence_lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    cuts = np.zeros((plan.num_samples + 1, 2), dtype)
    place = np.array([1, 0, plan.sequence_length])
    starts = range(0, len(document_index), _PIECE)

    def lengths_from(start: int) -> np.ndarray:
        return _gather(sequence_lengths, document_index[start : start + _PIECE])

    # Gathering lengths in shuffled order misses the cache each time, which several threads can wait for at once.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        gathered = pool.map(lengths_from, starts) if len(starts) > 1 else map(lengths_from, starts)
        for start, lengths in zip(starts, gathered, strict=True):
            _cut_stream(lengths, start, plan.sequence_length, plan.extra_tokens, place, cuts)
    if place[0] < len(cuts):  # the last sample is a partial one
        cuts[-1] = len(document_index) - 1, sequence_lengths[document_index[-1]] - plan.extra_tokens
    return cuts


def build_shuffle_index(plan: SamplePlan, random: np.random.RandomState) -> np.ndarray:
    """A permutation of the samples, those of a last epoch that is shuffled apart staying at the end."""
    dtype = np.uint32 if plan.num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(plan.num_samples, dtype=dtype)
    boundary = plan.num_samples if plan.samples_before_last_epoch is None else plan.samples_before_last_epoch
    for part in (order[:boundary], order[boundary:]):
        if part.size:
            random.shuffle(part)
    return order


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
    place: np.ndarray,
    cuts: np.ndarray,
) -> None:
    """Fill `cuts` as far as the sequences of these `lengths`, the next ones of the stream, reach.

    `place` is where to go on: the row to fill, the tokens before these sequences, and the tokens before the next cut.
    Cut k lies k * sequence_length tokens into the stream. It belongs to the sequence that holds the last token of
    sample k - 1, so without extra tokens it may lie at the very end of one.
    """
    row, begin, cut = place
    for i in range(lengths.shape[0]):
        end = begin + lengths[i]
        while cut + extra_tokens <= end and row < cuts.shape[0]:
            cuts[row, 0] = first_entry + i
            cuts[row, 1] = cut - begin
            row += 1
            cut += sequence_length
        begin = end
    place[0], place[1], place[2] = row, begin, cut
