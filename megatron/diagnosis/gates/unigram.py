"""The unigram entropy of a run's data: the loss of a model that knows only how frequent each token is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.exceptions import UserError
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.datasets.utils import Blend
from megatron.data.preparation.manifest import read_manifest
from megatron.training.data.sources import get_blend_and_blend_per_split

TOKENS_PER_SOURCE = 2_000_000
"""Size of the sample that is counted, for each data set of a blend."""
_RUNS = 200
"""Number of places that the sample is taken from, spread over the data set."""


@dataclass(frozen=True)
class DataFacts:
    """What the data says about the loss of models that know little."""

    unigram: float | None = None
    """Unigram entropy in nats."""
    vocabulary: int | None = None
    """Entries of the tokenizer's vocabulary, from the manifest."""


def unigram_entropy(counts: np.ndarray) -> float:
    """Returns -sum p ln p of counts or shares by token id, in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def facts_of_flags(values: dict[str, object]) -> DataFacts:
    """Returns the facts about the training data that these flag values (by field name) point to. Fields are None if
    there are no such files, as with made-up data."""
    if values.get("mock_data") or values.get("sft"):
        return DataFacts()
    fields = ("per_split_data_args_path", "data_args_path", "data_stages", "data_path")
    names = (*fields, "train_data_path", "valid_data_path", "test_data_path")
    blend, per_split = get_blend_and_blend_per_split(_Values({name: values.get(name) for name in names}))
    train = blend if per_split is None else per_split[0]
    return DataFacts() if train is None else facts_of_blend(train)


class _Values:
    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def facts_of_blend(blend: Blend, tokens: int = TOKENS_PER_SOURCE) -> DataFacts:
    """Returns the facts about a blend. The frequencies are those of the blend's sources by their weights; without
    weights by their sizes. Raises UserError if a file is broken."""
    prefixes, weights = blend
    shares: list[np.ndarray] = []
    sizes: list[float] = []
    vocabulary = None
    for prefix in prefixes:
        if not IndexedDataset.exists(prefix):
            return DataFacts()
        data = IndexedDataset(prefix)
        counts = np.bincount(_sample(data, tokens)).astype(np.float64)
        if not counts.sum():
            raise UserError(f"{prefix}: the data set has no tokens")
        shares.append(counts / counts.sum())
        sizes.append(float(data.sequence_lengths.sum(dtype=np.int64)))
        manifest = read_manifest(prefix)
        vocabulary = vocabulary if manifest is None else manifest.tokenizer.vocab_size
    mixed = np.zeros(max(map(len, shares)))
    total = sizes if weights is None else weights
    for share, weight in zip(shares, total, strict=True):
        mixed[: len(share)] += share * weight
    return DataFacts(unigram_entropy(mixed), vocabulary)


def _sample(data: IndexedDataset, tokens: int) -> np.ndarray:
    """Returns about `tokens` ids from places spread over the data set; all ids if there are no more."""
    lengths = data.sequence_lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    if not len(ends) or ends[-1] <= tokens:
        return _read(data, range(len(lengths)))
    each = math.ceil(tokens / _RUNS)
    found: list[np.ndarray] = []
    for begin in np.linspace(0, ends[-1] - each, _RUNS).astype(np.int64):
        first, offset = int(np.searchsorted(ends, begin, side="right")), 0
        offset = int(begin - (ends[first] - lengths[first]))
        wanted = each
        while wanted > 0 and first < len(lengths):
            count = min(wanted, int(lengths[first]) - offset)
            found.append(np.asarray(data.get(first, offset, count)))
            wanted, first, offset = wanted - count, first + 1, 0
    return np.concatenate(found)


def _read(data: IndexedDataset, numbers: Sequence[int]) -> np.ndarray:
    found = [np.asarray(data[number]) for number in numbers]
    return np.concatenate(found) if found else np.empty(0, np.int64)
