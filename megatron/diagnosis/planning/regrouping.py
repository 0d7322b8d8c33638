"""Rows of documents: global batches of documents of the run's data, simulated in rows and with dynamic context
parallelism.

The simulation counts the work of documents and how long ranks wait for one another, not their communication.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.context_parallel.regrouping import document_costs, finish_times, regroup, row_finish_times
from megatron.data.datasets.conversations import ConversationFile, parse_conversation
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.datasets.utils import Blend, normalize
from megatron.data.tokenizer.base import Tokenizer
from megatron.diagnosis.planning.exposed import way_of_context
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.balanced_batches import balanced_order
from megatron.training.data.regrouped_batches import work_of_token

_STEPS = 8
_TOKENS = 30_000_000
"""About as many tokens are simulated at most; a step more than that is simulated whole."""
_CONVERSATIONS = 500
"""Conversations of each file whose lengths stand for all."""


@dataclass(frozen=True)
class PackedDocuments:
    """Simulated steps in rows over --context-parallel-size, whose padding is computed like a document."""

    steps: int
    documents: int
    document_tokens: float
    """Mean length of the document, or the padding, of a token."""
    uneven: float
    """Attention of the slowest ranks, divided by that of all ranks on average."""


@dataclass(frozen=True)
class RegroupingGain(PackedDocuments):
    """These steps with dynamic context parallelism too. Times are sums over the steps, in one unit."""

    work: float
    """Work of the documents divided by the number of ranks: the time without waiting."""
    row_work: float
    """`work` with the padding of rows."""
    in_rows: float
    """Time in rows."""
    regrouped: float

    @property
    def gain(self) -> float:
        """How many times faster a step is."""
        return self.in_rows / self.regrouped

    def idle(self, time: float) -> float:
        """The part of a time that is no work of a document: ranks wait or compute padding."""
        return 1 - self.work / time


def packs_documents(config: PretrainConfig) -> bool:
    """Whether attention keeps the documents of a row apart."""
    return config.data.reset_attention_mask or config.training.sft


def packed_documents(config: PretrainConfig, blend: Blend, tokenizer: Tokenizer) -> PackedDocuments:
    """Returns what rows of documents drawn at random from a blend cost; with dynamic context parallelism also its gain.
    Raises UserError for data that cannot be read."""
    length, size = config.data.seq_length, config.training.global_batch_size
    ranks, context = config.grid.data * config.grid.context, config.grid.context
    steps = max(1, min(_STEPS, _TOKENS // (size * length)))
    rows = _rows(_documents(config, blend, tokenizer), length, steps * size, whole=config.training.sft)
    batches = [_in_turns(config, rows[first : first + size]) for first in range(0, len(rows), size)]
    pieces = np.array([piece for row in rows for piece in (*row, length - sum(row))])
    parts = _parts_of_row(config)
    slowest = sum(max(row_finish_times(batch, ranks * parts // context, parts, length, 0)) for batch in batches)
    mean = document_costs(pieces, 1).sum() / (ranks * parts // context)
    documents = sum(map(len, rows))
    found = PackedDocuments(steps, documents, float((pieces**2).sum() / pieces.sum()), float(slowest / mean))
    return _with_gain(config, found, batches) if config.transformer.hybrid_context_parallel else found


def _parts_of_row(config: PretrainConfig) -> int:
    """Returns into how many parts of unequal attention context parallel ranks cut a row. Ranks that exchange tokens for
    heads attend to the same tokens."""
    way = way_of_context(config)
    if way == "a2a":
        return 1
    levels = config.transformer.hierarchical_context_parallel_sizes
    return levels[-1] if way == "a2a+p2p" and levels else config.grid.context


def _in_turns(config: PretrainConfig, batch: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Returns the rows of a global batch in the order in which data parallel ranks take one each."""
    each, ranks = config.training.micro_batch_size, config.grid.data
    if config.data.balanced_packing:
        pairs = [int(document_costs(row, 0).sum()) for row in batch]
        batch = [batch[number] for number in balanced_order(pairs, each)]
    places = range(0, len(batch), each * ranks)
    return [
        batch[first + rank * each + row]
        for first in places
        for row in range(each)
        for rank in range(ranks)
        if first + rank * each + row < len(batch)
    ]


def _with_gain(
    config: PretrainConfig, found: PackedDocuments, batches: Sequence[Sequence[Sequence[int]]]
) -> RegroupingGain:
    room, length = config.transformer.max_seqlen_per_dp_cp_rank, config.data.seq_length
    assert room is not None
    ranks, context = config.grid.data * config.grid.context, config.grid.context
    per_token, totals = work_of_token(config.transformer), np.zeros(4)
    for batch in batches:
        lengths = [document for row in batch for document in row]
        padding = [length - sum(row) for row in batch]
        costs = document_costs(lengths, per_token)
        plan = regroup(lengths, ranks, room, per_token)
        own, all_rows = costs.sum() / ranks, (costs.sum() + document_costs(padding, per_token).sum()) / ranks
        static = row_finish_times(batch, ranks, context, length, per_token)
        totals += [own, all_rows, max(static), max(finish_times(plan, costs, ranks))]
    return RegroupingGain(*dataclasses.astuple(found), *totals.tolist())


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
