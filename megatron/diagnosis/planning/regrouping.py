"""What dynamic context parallelism saves: global batches of documents of the run's data, simulated with it and without.

The simulation counts the work of documents and how long ranks wait for one another, not their communication.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron.core.context_parallel.regrouping import document_costs, finish_times, regroup, row_finish_times
from megatron.data.datasets.conversations import ConversationFile, parse_conversation
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.datasets.utils import Blend, normalize
from megatron.data.tokenizer.base import Tokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.regrouped_batches import work_of_token

_STEPS = 8
_TOKENS = 30_000_000
"""About as many tokens are simulated at most; a step more than that is simulated whole."""
_CONVERSATIONS = 500
"""Conversations of each file whose lengths stand for all."""


@dataclass(frozen=True)
class RegroupingGain:
    """Simulated steps. Times are sums over the steps, in one unit."""

    steps: int
    documents: int
    document_tokens: float
    """Mean length of the document of a token."""
    work: float
    """Work of the documents divided by the number of ranks: the time without waiting."""
    in_rows: float
    """Time in rows over --context-parallel-size, whose padding is computed too."""
    regrouped: float

    @property
    def gain(self) -> float:
        """How many times faster a step is."""
        return self.in_rows / self.regrouped

    def idle(self, time: float) -> float:
        """The part of a time that is no work of a document: ranks wait or compute padding."""
        return 1 - self.work / time


def regrouping_gain(config: PretrainConfig, blend: Blend, tokenizer: Tokenizer) -> RegroupingGain:
    """Returns the gain for documents drawn at random from a blend. Raises UserError for data that cannot be read."""
    transformer, length = config.transformer, config.data.seq_length
    room, size = transformer.max_seqlen_per_dp_cp_rank, config.training.global_batch_size
    assert room is not None
    ranks, context = config.grid.data * config.grid.context, config.grid.context
    steps = max(1, min(_STEPS, _TOKENS // (size * length)))
    rows = _rows(_documents(config, blend, tokenizer), length, steps * size, whole=config.training.sft)
    every = np.array([document for row in rows for document in row])
    per_token, totals = work_of_token(transformer), np.zeros(3)
    for step in (rows[first : first + size] for first in range(0, len(rows), size)):
        lengths = [document for row in step for document in row]
        costs = document_costs(lengths, per_token)
        plan = regroup(lengths, ranks, room, per_token)
        static = row_finish_times(step, ranks, context, length, per_token)
        totals += [costs.sum() / ranks, max(static), max(finish_times(plan, costs, ranks))]
    return RegroupingGain(steps, len(every), float((every**2).sum() / every.sum()), *totals.tolist())


def _documents(config: PretrainConfig, blend: Blend, tokenizer: Tokenizer) -> Iterator[int]:
    """Yields lengths of documents for ever, each data set by its weight, its documents in random order."""
    prefixes, weights = blend
    known = [_lengths(prefix, config.training.sft, tokenizer) for prefix in prefixes]
    sizes = [lengths.sum() for lengths in known]
    means = np.array([lengths.mean() for lengths in known])
    shares = np.array(normalize(weights if weights is not None else sizes)) / means  # weights are shares of tokens
    generator = np.random.default_rng(config.seed)
    while True:
        for source in generator.choice(len(known), 1024, p=shares / shares.sum()):
            yield int(generator.choice(known[source]))


def _lengths(prefix: str, of_conversations: bool, tokenizer: Tokenizer) -> np.ndarray:
    if not of_conversations:
        return np.maximum(IndexedDataset(prefix).sequence_lengths, 1)
    lines = itertools.islice(ConversationFile(prefix), _CONVERSATIONS)
    encoded = (tokenizer.encode_conversation(*parse_conversation(line))[0] for _, line in lines)  # type: ignore[attr-defined]
    return np.array([max(1, len(ids) - 1) for ids in encoded])


def _rows(documents: Iterator[int], length: int, count: int, whole: bool) -> list[list[int]]:
    """Returns rows of documents: a stream that is cut where rows end, or `whole` documents and padding."""
    rows: list[list[int]] = [[]]
    left = length
    for document in documents:
        document = min(document, length) if whole else document
        if whole and document > left:
            rows.append([])
            left = length
        while document:
            if not left:
                rows.append([])
                left = length
            rows[-1].append(min(document, left))
            document -= rows[-1][-1]
            left -= rows[-1][-1]
        if len(rows) > count:
            return rows[:count]
    raise AssertionError("documents never end")


def gain_line(found: RegroupingGain, context: int) -> str:
    """Returns the line of the report."""
    return (
        f"regrouping  ranks idle {found.idle(found.regrouped):.1%} of a step, and {found.idle(found.in_rows):.1%} in "
        f"rows over --context-parallel-size {context}: {found.gain:.2f} times as fast (simulated without "
        f"communication: {found.documents:,} documents of {found.steps} steps)"
    )
