"""Describes the data of a run at the start of its log: samples, tokens and epochs of each data set of each split."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.utils.url_keys import hide_keys
from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.staged_blend import StagedBlend

MOST_LINES = 64
"""Largest number of data sets of a split that get a line each."""


def data_plan(splits: Sequence[Any], wanted: Sequence[int | None], seq_length: int) -> Iterator[str]:
    """Yields a line for each data set of the training, validation and test data.

    `splits` are the three data sets, each None, a data set, a blend, or a list of validation sets; those of a script's
    own kind are left out. `wanted` has the samples that the run takes from each split; None: all of them.
    """
    for name, split, samples in zip(("training", "validation", "test"), splits, wanted, strict=True):
        for each in split if isinstance(split, list | tuple) else [split]:
            found = list(_sources(each, samples))
            for source, count in found[:MOST_LINES]:
                yield f"{name} data: {_line(source, count, seq_length)}"
            if len(found) > MOST_LINES:
                rest = sum(count for _, count in found[MOST_LINES:])
                yield f"{name} data: {rest:,} samples of {len(found) - MOST_LINES} more data sets"


def _sources(split: Any, samples: int | None) -> Iterator[tuple[MegatronDataset, int]]:
    """Yields the data sets of a split, and the samples that the run takes from each."""
    if isinstance(split, StagedBlend):
        drawn = split.order.before[-1].tolist()
        yield from ((passes[0], count) for passes, count in zip(split.passes, drawn, strict=True) if passes)
    elif isinstance(split, BlendedDataset):
        whole = sum(map(len, split.datasets))
        shares = split.weights or [len(dataset) / whole for dataset in split.datasets]
        size = len(split) if samples is None else min(samples, len(split))
        yield from ((dataset, round(share * size)) for dataset, share in zip(split.datasets, shares, strict=True))
    elif isinstance(split, MegatronDataset):
        yield split, len(split) if samples is None else samples


def _line(dataset: MegatronDataset, samples: int, seq_length: int) -> str:
    text = f"{samples:,} samples of {hide_keys(dataset.dataset_path or 'made-up data')}"
    tokens = getattr(dataset, "tokens_per_epoch", None)
    if not tokens or dataset.dataset_path is None:
        return text
    return f"{text}, {samples * seq_length:,} tokens, {samples * seq_length / tokens:.3g} epochs of its {tokens:,}"
