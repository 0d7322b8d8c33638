"""A data set of `input_ids` and `labels`, as the Trainer of Transformers takes it, as samples of a run."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.core.exceptions import UserError
from megatron.training.data.batch import Batch, collate_gpt

IGNORED = -100
"""Label of a position without loss."""


class Rows(Protocol):
    """A map-style data set, such as a list, one of torch, or one of the package datasets."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, object]: ...


class CausalRows(Dataset[dict[str, Tensor]]):
    """Samples of `length` tokens from a map-style data set whose items have `input_ids`, perhaps `labels` and
    `attention_mask`.

    As in Transformers, a label belongs to the token at its own position, and the logits before it predict it. Without
    labels each token is predicted, except those that `attention_mask` leaves out. Shorter rows are filled up at the
    end, without loss. Raises UserError, which names the item, for one that is longer or that is padded at its start.
    """

    def __init__(self, rows: Rows, length: int, samples: int | None = None, vocabulary: int | None = None) -> None:
        self.rows, self.length, self.vocabulary = rows, length, vocabulary
        self.samples = len(rows) if samples is None else samples
        """Number of samples; above the number of rows they are read again from the first."""

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        """Returns a sample; for None one without loss, which fills up a batch."""
        if index is None:
            return self._sample([0], [IGNORED], -1)
        item = self.rows[int(index) % len(self.rows)]
        tokens = ids_of(item, index)
        mask = ids_of(item, index, "attention_mask") if "attention_mask" in item else [1] * len(tokens)
        labels = (
            ids_of(item, index, "labels")
            if "labels" in item
            else [token if seen else IGNORED for token, seen in zip(tokens, mask, strict=True)]
        )
        if not len(labels) == len(tokens) == len(mask):
            raise UserError(f"item {index} of the data set: input_ids, labels and attention_mask differ in length")
        if len(tokens) > self.length:
            raise UserError(
                f"item {index} of the data set has {len(tokens)} tokens; at most {self.length} fit: cut it, or give a "
                "longer Trainer(seq_length=...)"
            )
        if not tokens or (0 in mask and 1 in mask[mask.index(0) :]):
            raise UserError(f"item {index} of the data set is empty or padded before its end; pad on the right")
        self._check_ids("input_ids", index, tokens)
        self._check_ids("labels", index, (label for label in labels if label != IGNORED))
        return self._sample(tokens, labels, int(index))

    def _check_ids(self, name: str, index: int, ids: Iterable[int]) -> None:
        """Raises UserError for an id that the model has no row for."""
        size = self.vocabulary
        wrong = next((one for one in ids if one < 0 or (size is not None and one >= size)), None)
        if wrong is not None:
            rows = "" if size is None else f"; the model has ids from 0 to {size - 1}: is the tokenizer another one?"
            raise UserError(f"item {index} of the data set: {wrong} in {name} is no token id{rows}")

    def _sample(self, tokens: list[int], labels: list[int], number: int) -> dict[str, Tensor]:
        """Shifts the labels by one, so that position i has the token that is predicted after it."""
        rest = self.length - len(tokens)
        shifted = torch.tensor([*labels[1:], IGNORED, *[IGNORED] * rest])
        return {
            "tokens": torch.tensor([*tokens, *[0] * rest]),
            "labels": shifted.clamp(min=0),
            "loss_mask": (shifted != IGNORED).float(),
            "position_ids": torch.arange(self.length),
            "sample_id": torch.tensor(number),
        }

    @staticmethod
    def collate(items: Sequence[Mapping[str, Tensor]]) -> Batch:
        """Returns the batch of some items."""
        return collate_gpt(items)


def ids_of(item: object, index: int, name: str = "input_ids") -> list[int]:
    """Returns the ids of an item, also where they are a batch of one. Raises UserError, which names the item."""
    if not isinstance(item, Mapping) or name not in item:
        raise UserError(f"item {index} of the data set has no {name}; a tokenizer makes them from text")
    try:
        found = torch.as_tensor(item[name])
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(())
    if found.dim() == 2 and len(found) == 1:
        found = found[0]
    if found.dim() != 1 or (found.is_floating_point() and found.numel()):
        raise UserError(f"item {index} of the data set: {name} must be a list of whole numbers")
    return [int(value) for value in found.tolist()]
