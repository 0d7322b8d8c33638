"""--hybrid-context-parallel: micro-batches of documents that leave their rows, on as many ranks as each needs.

All ranks plan the same micro-batches of a global batch from the lengths of its documents (`regroup`). A rank reads the
whole documents of its micro-batches; the forward step cuts its part.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.core.context_parallel.regrouping import padded_length, regroup
from megatron.core.exceptions import UserError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.data.batch import Batch, collate_gpt


@dataclass(frozen=True)
class Regrouping:
    """How a run places documents. The ranks are those of `dp_cp`."""

    rank: int
    num_ranks: int
    tokens_per_rank: int
    """--max-seqlen-per-dp-cp-rank."""
    work_per_token: int
    """Work of a token outside of attention (`document_costs`)."""
    multiple: int = 1
    """A number that divides the tokens of each rank, for sequence parallelism."""
    rows_end_with_padding: bool = False
    """Whether the last of a row's lengths is that of its padding, which is left out."""


def work_of_token(config: TransformerConfig) -> int:
    """Returns the work of a token outside of attention, in the unit of `document_costs`: a layer of hidden size h has
    about 12 h^2 weights, so 24 h^2 operations per token, and 4 h per pair of a query and a key. It affects only how
    evenly ranks are loaded."""
    return 12 * config.hidden_size


@dataclass(frozen=True)
class Document:
    """A document of a row; with `row` None, tokens without loss for a rank that has no document."""

    row: int | None
    start: int
    length: int


@dataclass(frozen=True)
class RegroupedDocuments:
    """The documents of one micro-batch of this rank."""

    documents: tuple[Document, ...]
    num_ranks: int
    """Number of ranks that share the micro-batch."""
    of_step: int
    """Number of micro-batches of this rank in the step."""


class HasDocuments(Protocol):
    """A data set of rows of documents."""

    def document_lengths(self, idx: int) -> np.ndarray:
        """Returns the number of tokens of each document of a row, int64."""


class RegroupedSampler:
    """The micro-batches of one rank: of each global batch, those that `regroup` gives to it.

    Args:
        ids: the ids of the run in order, in lists of any length.
        batch_sizes: the sizes of the global batches.
        dataset: its `document_lengths(id)` returns the lengths of the documents of a row.

    Raises UserError for a dataset without `document_lengths`.
    """

    def __init__(
        self, ids: Iterable[list[int | None]], batch_sizes: Iterable[int], dataset: HasDocuments, regrouping: Regrouping
    ) -> None:
        if not hasattr(dataset, "document_lengths"):
            raise UserError(
                f"--hybrid-context-parallel: the script's training data is a {type(dataset).__name__}, which has no "
                "document_lengths(index); leave the flag out"
            )
        self.ids, self.batch_sizes, self.dataset, self.regrouping = ids, batch_sizes, dataset, regrouping

    def __iter__(self) -> Iterator[list[RegroupedDocuments]]:
        ids = itertools.chain.from_iterable(self.ids)
        for size in self.batch_sizes:
            rows = list(itertools.islice(ids, size))
            if len(rows) < size:
                return
            yield from ([each] for each in self._of_this_rank(rows))

    def _of_this_rank(self, rows: Sequence[int | None]) -> list[RegroupedDocuments]:
        how = self.regrouping
        documents = [document for row in rows for document in self._documents(row)]
        lengths = [document.length for document in documents]
        plan = regroup(lengths, how.num_ranks, how.tokens_per_rank, how.work_per_token)
        own = [
            (tuple(documents[number] for number in shared.documents), shared.num_ranks)
            for shared in plan
            if shared.first_rank <= how.rank < shared.first_rank + shared.num_ranks
        ] or [((Document(None, 0, how.multiple),), 1)]
        return [RegroupedDocuments(*each, of_step=len(own)) for each in own]

    def _documents(self, row: int | None) -> Iterator[Document]:
        if row is None:
            return
        lengths = self.dataset.document_lengths(row).tolist()
        end = 0
        for length in lengths[:-1] if self.regrouping.rows_end_with_padding else lengths:
            if length:
                yield Document(row, end, length)
            end += length


class RegroupedRows(Dataset[Batch]):
    """Micro-batches by `RegroupedDocuments`: the documents end to end in one row, then padding without loss.

    Raises UserError if a document of the plan is not one of the row: tokens of several documents would no longer see
    each other.
    """

    def __init__(self, dataset: Dataset[Mapping[str, object]], multiple: int) -> None:
        self.dataset, self.multiple = dataset, multiple

    def __getitem__(self, planned: RegroupedDocuments) -> Batch:
        rows: dict[int | None, Batch] = {}
        for document in planned.documents:
            if document.row not in rows:
                rows[document.row] = collate_gpt([self.dataset[document.row]])
        lengths: list[int] = []
        for document in planned.documents:
            lengths += _lengths_within(rows[document.row], document)
        missing = padded_length(sum(lengths), planned.num_ranks, self.multiple) - sum(lengths)
        parts = [(rows[document.row], document.start, document.length) for document in planned.documents]
        first = rows[planned.documents[0].row]

        def joined(name: str, example: Tensor) -> Tensor:
            pieces = [getattr(row, name)[:, start : start + length] for row, start, length in parts]
            return torch.cat([*pieces, example.new_zeros(1, missing)], 1)

        bounds = torch.tensor([0, *lengths, *([missing] if missing else [])]).cumsum(0).to(torch.int32)
        return dataclasses.replace(
            first.with_rows(joined),
            attention_mask=None,
            cu_seqlens=bounds,
            max_seqlen=max(*lengths, missing),
            sample_ids=torch.cat([row.sample_ids for row in rows.values() if row.sample_ids is not None]),
            local_cp_size=planned.num_ranks,
            of_step=planned.of_step,
        )


def _lengths_within(row: Batch, document: Document) -> list[int]:
    """Returns the lengths of the documents by the row's own boundaries between the ends of a document of the plan."""
    assert row.cu_seqlens is not None
    bounds: list[int] = row.cu_seqlens.tolist()
    end = document.start + document.length
    if document.row is None:
        return [document.length]
    if document.start not in bounds or end not in bounds:
        raise UserError(
            f"sample {document.row}: --hybrid-context-parallel: a document of {document.length} tokens from token "
            f"{document.start} has no end-of-document token, so its tokens are seen by the next one; prepare the data "
            "with --append-eod"
        )
    within = [document.start, *(bound for bound in bounds if document.start < bound < end), end]
    return [after - before for before, after in itertools.pairwise(within)]


def only_item(items: Sequence[Batch]) -> Batch:
    """Returns the micro-batch, which `RegroupedRows` has made."""
    (batch,) = items
    return batch
