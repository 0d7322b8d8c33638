"""Micro-batches as loaders deliver them: the base class of the batches of all models, and the batch of a GPT run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.core.context_parallel import cut_rows
from megatron.core.exceptions import UserError
from megatron.core.tokens import SequencePart


@dataclass(frozen=True)
class BatchRecord:
    """A batch whose fields are tensors, or None. `sample_ids` always stays on the host."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Returns a copy on another device. `sample_ids` stays on the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Returns a copy in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map(lambda tensor: tensor.pin_memory())

    def __getitem__(self, name: str) -> Any:
        """Returns a field by name, for user scripts: `batch["tokens"]`."""
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {
            field.name: change(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and field.name != "sample_ids"
        }
        return dataclasses.replace(self, **changed)


@dataclass(frozen=True)
class Batch(BatchRecord):
    """b samples of s tokens; with context parallelism (`part`), one rank's part of each sample.

    `cu_seqlens` refers to the rows laid end to end, b * s tokens, and separates rows like documents. It has one entry
    more than there are documents, so its length differs between batches.
    """

    tokens: Tensor
    """int64 [b, s]."""
    labels: Tensor
    """int64 [b, s]: the token to predict at each position."""
    loss_mask: Tensor
    """float32 [b, s]: 0 where the loss is masked out, otherwise 1."""
    position_ids: Tensor
    """int64 [b, s]."""
    attention_mask: Tensor | None = None
    """bool [b, 1, s, s], True where attention is masked; None unless the config requests it."""
    cu_seqlens: Tensor | None = None
    """int32 [documents + 1], from 0 to b * s of the whole rows; None if tokens attend across documents."""
    max_seqlen: int | None = None
    """Length of the longest document; None if `cu_seqlens` is None."""
    sources: Tensor | None = None
    """int32 [b, s]: position of the sample's data set in the blend, as the flags name them; for a single file of
    conversations the kind of turn (`TURN_KINDS`); otherwise None."""
    sample_ids: Tensor | None = None
    """int64 [b], always on the host: ids of the samples in the dataset; -1 for rows that only fill up the batch."""
    local_cp_size: int | None = None
    """With dynamic context parallelism, the number of ranks that share this micro-batch; None: those of
    --context-parallel-size."""
    of_step: int | None = None
    """With dynamic context parallelism, the number of micro-batches of this rank in the step."""

    def laid_end_to_end(self) -> "Batch":
        """Returns the batch as one row of b * s tokens, the form that models take with document boundaries."""
        return self.with_rows(lambda name, whole: whole.reshape(1, -1))

    def with_rows(self, change: Callable[[str, Tensor], Tensor]) -> "Batch":
        """Returns a copy with change(name, rows) in place of each field of shape [b, s] that is not None."""
        found = [(name, rows) for name in _ROWS if (rows := getattr(self, name)) is not None]
        changed: dict[str, Any] = {name: change(name, rows) for name, rows in found}
        return dataclasses.replace(self, **changed)

    def part(self, part: SequencePart | None) -> "Batch":
        """Returns one context parallel rank's part of whole rows; for None, the batch itself.

        The attention mask keeps the rows of the part's queries. `cu_seqlens` stays that of the whole rows, which must
        be laid end to end first. Raises UserError if the rows do not divide, and for a part of another number of ranks
        than those that share the batch.
        """
        if self.local_cp_size not in (None, 1 if part is None else part.size) or (
            self.local_cp_size is not None and part is not None and part.group is None
        ):
            raise UserError(
                f"--hybrid-context-parallel: {self.local_cp_size} ranks share this micro-batch, not those of {part}; "
                "the script needs sequence_part(groups, batch.local_cp_size) for every batch, as in pretrain_gpt.py"
            )
        if part is None:
            return self
        assert self.cu_seqlens is None or len(self.tokens) == 1, (
            "a batch with document boundaries is laid end to end before it is split"
        )
        mask = None if self.attention_mask is None else cut_rows(self.attention_mask, part, 2)
        return dataclasses.replace(self.with_rows(lambda name, whole: cut_rows(whole, part, 1)), attention_mask=mask)


def collate_gpt(items: Sequence[Mapping[str, Any]]) -> Batch:
    """Returns the batch of some items of a GPT dataset."""
    stacked: dict[str, Any] = {
        name: torch.stack([item[name] for item in items]) for name in _STACKED if name in items[0]
    }
    if "source" in items[0]:
        sources = torch.tensor([item["source"] for item in items], dtype=torch.int32)
        stacked["sources"] = sources[:, None].expand(stacked["tokens"].shape).contiguous()
    elif "turn_kinds" in items[0]:
        stacked["sources"] = torch.stack([item["turn_kinds"] for item in items])
    sample_ids = torch.stack([item["sample_id"] for item in items]) if "sample_id" in items[0] else None
    if "cu_seqlens" not in items[0]:
        return Batch(**stacked, sample_ids=sample_ids)
    return Batch(
        **stacked,
        cu_seqlens=_join_boundaries([item["cu_seqlens"] for item in items]),
        max_seqlen=max(int(item["max_seqlen"]) for item in items),
        sample_ids=sample_ids,
    )


def stack_items(items: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Tensor]:
    """Returns these entries of the items, each stacked to one tensor, and the items' `sample_id` as `sample_ids`."""
    stacked = {name: torch.stack([item[name] for item in items]) for name in names}
    return stacked | {"sample_ids": torch.stack([item["sample_id"] for item in items])}


_ROWS = ("tokens", "labels", "loss_mask", "position_ids", "sources")
_STACKED = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def _join_boundaries(rows: Sequence[Tensor]) -> Tensor:
    """Returns boundaries of the rows laid end to end, from those of each row (from 0 to s, then s repeated)."""
    length = int(rows[0][-1])
    starts = [row[row < length] + number * length for number, row in enumerate(rows)]
    return torch.cat([*starts, torch.tensor([len(rows) * length], dtype=torch.int32)])


class CollatedDataset(Dataset[Any]):
    """A user's data set with its own function that makes a batch from a list of items.

    Rows that fill up the last batch of a whole pass (index None) are the first item with a `loss_mask` of zeros.
    """

    def __init__(self, dataset: Any, collate: Callable[[Sequence[Any]], object]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int | None) -> object:
        if idx is not None:
            return self.dataset[idx]
        item = self.dataset[0]
        mask = item.get("loss_mask") if isinstance(item, Mapping) else None
        if not isinstance(mask, Tensor):
            raise UserError(
                "a pass over the whole data set fills up the last batch with rows without loss, which needs items with "
                "a tensor loss_mask; give a number of batches instead"
            )
        return {**item, "loss_mask": torch.zeros_like(mask)}
