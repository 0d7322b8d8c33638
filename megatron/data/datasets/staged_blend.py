"""A blend whose weights change at given samples, as a dataset (order: blend_stages.py)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron.data.datasets.blend_stages import StageOrder
from megatron.data.datasets.megatron_dataset import MegatronDataset


class StagedBlend(torch.utils.data.Dataset):
    """The samples of all stages, with `dataset_id` and `source` (index of the prefix) added.

    Args:
        order: the order of the samples.
        passes: for each prefix its datasets of one pass over the data, each with its own permutation.
    """

    def __init__(self, order: StageOrder, passes: Sequence[Sequence[MegatronDataset]], size: int) -> None:
        self.order = order
        self.passes = [list(datasets) for datasets in passes]
        self.size = size

    @property
    def datasets(self) -> list[MegatronDataset]:
        """The first pass of each prefix."""
        return [datasets[0] for datasets in self.passes if datasets]

    def __len__(self) -> int:
        return self.size

    def document_lengths(self, idx: int) -> np.ndarray:
        """Returns the number of tokens of each document of sample `idx`, int64."""
        dataset, number = self.order.locate(idx)
        part, number = divmod(number, len(self.passes[dataset][0]))
        return self.passes[dataset][part].document_lengths(number)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        sample = 0 if idx is None else idx
        if not 0 <= sample < self.size:
            raise IndexError(f"--data-stages: sample {idx} requested, there are {self.size}")
        dataset, number = self.order.locate(sample)
        each = len(self.passes[dataset][0])
        item = self.passes[dataset][number // each][None if idx is None else number % each]
        added = {"sample_id": torch.tensor(-1 if idx is None else idx), "source": dataset}
        return {"dataset_id": dataset, **item, **added}
