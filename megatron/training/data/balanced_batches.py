"""--balanced-packing: the order of the rows of a global batch, so that ranks wait less for each other.

All rows have the same number of tokens, so their matrix products cost the same. Attention costs as many products as
there are pairs of a query and a key in one document: a row with one long document costs more than one with many short
ones.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from megatron.core.exceptions import UserError
from megatron.training.data.samplers import DataParallelShard


def balanced_order(costs: Sequence[int] | np.ndarray, micro_batch_size: int) -> np.ndarray:
    """Returns the rows of a global batch in the order in which data parallel ranks take their micro-batches in turn.

    First the heaviest rows are dealt to micro-batches, one each, then the next ones, of which the lightest micro-batch
    gets the heaviest row (longest processing time first, Graham 1969, with equal numbers). Then the micro-batches are
    put in the order light, heavy, light: those that run at the same time on different ranks or stages are alike, a
    pipeline fills and drains with light ones, and the rank that got the lighter one of each round on the way up gets
    the heavier one on the way down. So the order suits any number of ranks without depending on it.
    """
    count = len(costs) // micro_batch_size
    costs = np.asarray(costs, np.int64)
    totals = np.zeros(count, np.int64)
    batches = np.empty((count, micro_batch_size), np.int64)
    for place, rows in enumerate(np.argsort(-costs, kind="stable").reshape(micro_batch_size, count)):
        lightest_first = np.argsort(totals, kind="stable")
        batches[lightest_first, place] = rows
        totals[lightest_first] += costs[rows]
    ascending = np.argsort(totals, kind="stable")
    return batches[np.concatenate([ascending[::2], ascending[1::2][::-1]])].reshape(-1)


class BalancedSampler:
    """Another sampler's ids, with those of each global batch in `balanced_order`.

    Args:
        ids: the ids of the run in order, in lists of any length.
        batch_sizes: the sizes of the global batches.
        dataset: its `document_lengths(id)` returns the lengths of the documents of a row.
        shard: the part of the stream that this rank reads.

    Raises UserError for a dataset without `document_lengths`.
    """

    def __init__(
        self, ids: Iterable[list[int | None]], batch_sizes: Iterable[int], dataset: Any, shard: DataParallelShard
    ) -> None:
        if not hasattr(dataset, "document_lengths"):
            raise UserError(
                f"--balanced-packing: the script's training data is a {type(dataset).__name__}, which has no "
                "document_lengths(index); leave the flag out"
            )
        self.ids = ids
        self.batch_sizes = batch_sizes
        self.dataset = dataset
        self.shard = shard

    def __iter__(self) -> Iterator[list[int | None]]:
        ids = itertools.chain.from_iterable(self.ids)
        for size in self.batch_sizes:
            batch = list(itertools.islice(ids, size))
            if len(batch) < size:
                return
            order = balanced_order([self._pairs(number) for number in batch], self.shard.micro_batch_size)
            for first in range(self.shard.offset, size, self.shard.stride):
                yield [batch[row] for row in order[first : first + self.shard.micro_batch_size].tolist()]

    def _pairs(self, number: int | None) -> int:
        """Returns twice the number of (query, key) pairs of a row under a causal mask."""
        lengths = self.dataset.document_lengths(number)
        return int((lengths * (lengths + 1)).sum())
