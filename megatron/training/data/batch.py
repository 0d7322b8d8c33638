"""One micro-batch, as the forward step gets it."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel import cut_rows
from megatron.core.tokens import SequencePart


@dataclass(frozen=True)
class Batch:
    """b samples of s tokens; under context parallelism (`part`) what a rank holds of each.

    `cu_seqlens` regards the rows as laid end to end, b * s tokens in all: rows are separated by it as documents are. It
    has one entry for each document and one more, so its length differs from batch to batch.
    """

    tokens: Tensor
    """int64 [b, s]."""
    labels: Tensor
    """int64 [b, s]: the token to predict at each place."""
    loss_mask: Tensor
    """float32 [b, s]: 0 where the loss does not count."""
    position_ids: Tensor
    """int64 [b, s]."""
    attention_mask: Tensor | None = None
    """bool [b, 1, s, s], True where attention is masked; None unless it was asked for."""
    cu_seqlens: Tensor | None = None
    """int32 [documents + 1], from 0 to b * s of whole rows; None when documents attend to each other."""
    max_seqlen: int | None = None
    """Tokens of the longest document; given with `cu_seqlens`."""
    sample_ids: Tensor | None = None
    """int64 [b], always on the host: the samples' ids in the dataset; -1 for rows that only fill the batch up."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """A copy on another device; `sample_ids` stays on the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def laid_end_to_end(self) -> "Batch":
        """The rows as one of b * s tokens: how a batch with document boundaries goes through a model."""
        return dataclasses.replace(self, **{name: getattr(self, name).reshape(1, -1) for name in _ROWS})

    def part(self, part: SequencePart | None) -> "Batch":
        """What one context parallel rank holds of whole rows; None: everything. Of the attention mask it keeps the rows
        of its queries; boundaries of documents stay those of whole rows, which are laid end to end before.

        Raises UserError where the rows do not divide.
        """
        if part is None:
            return self
        assert self.cu_seqlens is None or len(self.tokens) == 1, (
            "rows of documents are cut when they are laid end to end"
        )
        rows: dict[str, Any] = {name: cut_rows(getattr(self, name), part, 1) for name in _ROWS}
        mask = None if self.attention_mask is None else cut_rows(self.attention_mask, part, 2)
        return dataclasses.replace(self, **rows, attention_mask=mask)

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory, from which copies to a GPU need not be waited for."""
        return self._map(lambda tensor: tensor.pin_memory())

    def __getitem__(self, name: str) -> Any:
        """Fields by name, as user scripts read a batch: `batch["tokens"]`."""
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def _map(self, change: Any) -> "Batch":
        changed = {
            field.name: change(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and field.name != "sample_ids"
        }
        return dataclasses.replace(self, **changed)


def collate_gpt(items: Sequence[Mapping[str, Any]]) -> Batch:
    """Stack the items of a GPT dataset."""
    stacked: dict[str, Any] = {
        name: torch.stack([item[name] for item in items]) for name in _STACKED if name in items[0]
    }
    sample_ids = torch.stack([item["sample_id"] for item in items]) if "sample_id" in items[0] else None
    if "cu_seqlens" not in items[0]:
        return Batch(**stacked, sample_ids=sample_ids)
    return Batch(
        **stacked,
        cu_seqlens=_join_boundaries([item["cu_seqlens"] for item in items]),
        max_seqlen=max(int(item["max_seqlen"]) for item in items),
        sample_ids=sample_ids,
    )


_ROWS = ("tokens", "labels", "loss_mask", "position_ids")
_STACKED = (*_ROWS, "attention_mask")


def _join_boundaries(rows: Sequence[Tensor]) -> Tensor:
    """Boundaries within each row (from 0 to s, then s repeated) as boundaries of the rows laid end to end."""
    length = int(rows[0][-1])
    starts = [row[row < length] + number * length for number, row in enumerate(rows)]
    return torch.cat([*starts, torch.tensor([len(rows) * length], dtype=torch.int32)])
