"""Dynamic context parallelism: which ranks compute which documents of a global batch, as pure integers.

Every rank computes the same plan from the same lengths, so it is never sent. A document gets the fewest ranks that have
room for it: 1, 2, 4, ... neighbours. The documents of a single rank are packed into micro-batches.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.exceptions import UserError

_SMALLEST_PART = 256
"""Tokens of a rank below which a document that fits on fewer ranks is not split further."""


@dataclass(frozen=True)
class SharedMicroBatch:
    """One micro-batch, and the neighbouring ranks that share it."""

    first_rank: int
    num_ranks: int
    documents: tuple[int, ...]
    """Indices of its documents in the list of lengths: one document, or several on a single rank."""


def document_costs(lengths: Sequence[int] | np.ndarray, work_per_token: int) -> np.ndarray:
    """Returns the work of each document under a causal mask, int64, in units of half a pair of a query and a key.
    `work_per_token` is the work of a token in everything but attention, in the same unit."""
    lengths = np.asarray(lengths, np.int64)
    return lengths * (lengths + work_per_token)


def regroup(
    lengths: Sequence[int], num_ranks: int, tokens_per_rank: int, work_per_token: int
) -> list[SharedMicroBatch]:
    """Returns the micro-batches of documents of these lengths, in the order in which each rank computes its own.

    `num_ranks` is a power of two. No rank gets more than `tokens_per_rank` tokens of a micro-batch. Wide documents come
    first. Before documents of n ranks are placed, the n ranks of each group have equal work, so a rank never waits for
    the others of its group, only at the end of the step. Documents of equal width go, the heaviest first, to the ranks
    with the least work (Graham 1969). A document with more work per rank than the mean of all ranks is split further.
    Raises UserError for a document that has no room on all ranks together.
    """
    costs = document_costs(lengths, work_per_token).tolist()
    mean = -(-sum(costs) // num_ranks)
    widths = [_width(*each, num_ranks, tokens_per_rank, mean) for each in zip(lengths, costs, strict=True)]
    order = sorted(range(len(lengths)), key=lambda number: (-widths[number], -costs[number], number))
    loads = [0] * num_ranks
    shared: list[SharedMicroBatch] = []
    alone: list[list[int]] = [[] for _ in range(num_ranks)]
    groups: list[tuple[int, int]] = []  # work and first rank
    width = 0
    for number in order:
        if widths[number] != width:
            width = widths[number]
            groups = [(loads[first], first) for first in range(0, num_ranks, width)]
            heapq.heapify(groups)
        load, first = groups[0]
        load += -(-costs[number] // width)
        heapq.heapreplace(groups, (load, first))
        loads[first : first + width] = [load] * width
        if width == 1:
            alone[first].append(number)
        else:
            shared.append(SharedMicroBatch(first, width, (number,)))
    packed = [
        SharedMicroBatch(rank, 1, tuple(documents))
        for rank, numbers in enumerate(alone)
        for documents in _packed(numbers, lengths, tokens_per_rank)
    ]
    return shared + packed


def fewest_ranks(length: int, tokens_per_rank: int) -> int:
    """Returns the smallest power of two of ranks with room for a document."""
    return 1 << (-(-length // tokens_per_rank) - 1).bit_length()


def _width(length: int, cost: int, num_ranks: int, tokens_per_rank: int, mean: int) -> int:
    """Returns the number of ranks that share a document."""
    if length > num_ranks * tokens_per_rank:
        raise UserError(
            f"--max-seqlen-per-dp-cp-rank {tokens_per_rank}: a document of {length} tokens needs "
            f"{-(-length // tokens_per_rank)} ranks; there are {num_ranks}"
        )
    width = fewest_ranks(length, tokens_per_rank)
    while width < num_ranks and cost > width * mean and length >= 2 * width * _SMALLEST_PART:
        width *= 2
    return width


def _packed(numbers: Sequence[int], lengths: Sequence[int], room: int) -> list[list[int]]:
    """Puts each document into the first micro-batch that has room for it."""
    found: list[list[int]] = []
    left: list[int] = []
    for number in numbers:
        place = next((i for i, free in enumerate(left) if lengths[number] <= free), len(left))
        if place == len(left):
            found.append([])
            left.append(room)
        found[place].append(number)
        left[place] -= lengths[number]
    return found


def finish_times(plan: Sequence[SharedMicroBatch], costs: Sequence[int] | np.ndarray, num_ranks: int) -> list[float]:
    """Returns when each rank has computed its micro-batches. All ranks of a micro-batch begin it together."""
    clocks = [0.0] * num_ranks
    for shared in plan:
        ranks = slice(shared.first_rank, shared.first_rank + shared.num_ranks)
        work = sum(int(costs[number]) for number in shared.documents) / shared.num_ranks
        clocks[ranks] = [max(clocks[ranks]) + work] * shared.num_ranks
    return clocks


def row_finish_times(
    rows: Sequence[Sequence[int]], num_ranks: int, context: int, row_length: int, work_per_token: int
) -> list[float]:
    """Returns when each data parallel group has computed its rows of documents without regrouping, in the unit of
    `document_costs`. Groups of `context` ranks take the rows in turn. Ranks have zig-zag parts of a row: equally many
    tokens, but not pairs of a query and a key, so a group waits for its slowest rank in every row. Padding behind the
    documents of a row is computed like a document."""
    clocks = [0.0] * (num_ranks // context)
    for number, documents in enumerate(rows):
        padding = [row_length - sum(documents)]
        if context == 1:
            clocks[number % len(clocks)] += float(document_costs([*documents, *padding], work_per_token + 1).sum())
            continue
        keys = np.concatenate([2 * np.arange(1, length + 1) for length in [*documents, *padding]])
        chunks = (keys + work_per_token).reshape(2 * context, -1).sum(1)
        clocks[number % len(clocks)] += float((chunks[:context] + chunks[context:][::-1]).max())
    return clocks


def padded_length(length: int, num_ranks: int, multiple: int) -> int:
    """Returns the number of tokens of a micro-batch of `length` tokens on so many ranks. Each rank has two chunks of a
    shared row, and `multiple` divides its number of tokens."""
    each = multiple * num_ranks if num_ranks == 1 else math.lcm(2, multiple) * num_ranks
    return max(each, -(-length // each) * each)
