"""A blend: several datasets as one, which draws samples in proportion to weights."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron.core.exceptions import UserError
from megatron.core.utils.warn import is_first_rank
from megatron.data.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.data.datasets.blending import BlendOrder, BlendSlice
from megatron.data.datasets.index_cache import IndexCache
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.utils import check_weights, normalize

_BLOCKS_BETWEEN_SAVES = 1024


class BlendedDataset(torch.utils.data.Dataset):
    """A blend of `size` samples in Megatron-LM's order (blending.py). The order is computed while samples are read.

    Args:
        datasets: the datasets to blend, all of one split.
        weights: share of each dataset; None: its number of samples.
        size: samples in the blend; None (with weights None): all samples of all datasets, once.
        config: the run's data configuration. With `path_to_cache`, the state of long blends is stored there, so that a
            resumed run does not recompute the order of earlier samples.

        sources: position of each dataset in the blend of the flags, if some datasets are left out; None: all are used.

    Items are those of the datasets, with `dataset_id` and its `source` added. `sample_id` is the index in the blend.

    Raises UserError for weights without a size, and IndexError if a dataset has fewer samples than the blend draws
    from it.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float] | None,
        size: int | None,
        config: BlendedMegatronDatasetConfig,
        sources: Sequence[int] | None = None,
    ) -> None:
        if not datasets:
            raise UserError("a blend needs at least one dataset")
        if weights is not None and len(weights) != len(datasets):
            raise UserError(f"{len(weights)} weights for a blend of {len(datasets)} datasets")
        if (weights is None) != (size is None):
            raise UserError("a blend is given weights and a size, or neither (every sample once)")
        self.datasets = list(datasets)
        self.sources = list(range(len(self.datasets)) if sources is None else sources)
        self.split = self.datasets[0].index_split
        self.config = config
        lengths = np.array([len(dataset) for dataset in self.datasets], dtype=np.int64)
        if weights is None or size is None:
            self.weights = None
            self.size = int(lengths.sum())
            self.order = BlendOrder(lengths / lengths.sum(dtype=np.float64), self.size, limits=lengths)
        else:
            self.weights = normalize(check_weights(weights))
            self.size = size
            self.order = BlendOrder(np.array(self.weights), size)
            self._check_lengths(lengths)
        self._cache = IndexCache(config.path_to_cache, f"BlendedDataset-{self.split.name}", self.unique_description)
        self._saved_blocks = self._load_counts()

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """Everything that the order of the blend depends on, as JSON values."""
        return OrderedDict(
            {
                "class": type(self).__name__,
                "datasets": [len(dataset) for dataset in self.datasets] if self.weights is None else len(self.datasets),
                "split": self.split.name,
                "weights": self.weights,
                "size": self.size,
                "block": self.order.block,
            }
        )

    @property
    def unique_description(self) -> str:
        """The identifiers as text."""
        return json.dumps(self.unique_identifiers, indent=4)

    @property
    def unique_description_hash(self) -> str:
        """An MD5 hash of the description."""
        return hashlib.md5(self.unique_description.encode(), usedforsecurity=False).hexdigest()

    def taken(self, consumed: int) -> np.ndarray:
        """Returns how many of the first `consumed` samples came from each dataset: int64 [datasets]."""
        return self.order.taken(consumed)

    @property
    def dataset_index(self) -> np.ndarray:
        """int16 [size]: the dataset of each sample. Computed at each access; `indices` computes a part of it."""
        return self.indices(0, self.size).dataset_index

    @property
    def dataset_sample_index(self) -> np.ndarray:
        """int64 [size]: the index of each sample in its dataset. Computed at each access; `indices` computes a part."""
        return self.indices(0, self.size).dataset_sample_index

    def indices(self, start: int, stop: int) -> BlendSlice:
        """Returns datasets and indices of the samples [start, stop) of the blend."""
        found = self.order.indices(start, stop)
        self._save_counts()
        return found

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        sample = 0 if idx is None else idx
        if not 0 <= sample < self.size:
            raise IndexError(f"blend ({self.split.name} split): sample {idx} requested, there are {self.size}")
        dataset_id, dataset_sample = self.order.locate(sample)
        self._save_counts()
        item = self.datasets[dataset_id][None if idx is None else dataset_sample]
        added = {"sample_id": torch.tensor(-1 if idx is None else idx), "source": self.sources[dataset_id]}
        return {"dataset_id": dataset_id, **item, **added}

    def document_lengths(self, idx: int) -> np.ndarray:
        """Returns the number of tokens of each document of sample `idx`, int64."""
        dataset, number = self.order.locate(idx)
        return self.datasets[dataset].document_lengths(number)

    def _check_lengths(self, lengths: np.ndarray) -> None:
        if (self.order.upper_bounds() <= lengths).all():
            return
        counts = self.order.counts()
        for dataset, length, count in zip(self.datasets, lengths.tolist(), counts.tolist(), strict=True):
            if count > length:
                raise IndexError(
                    f"a blend of {self.size} samples draws {count} from {getattr(dataset, 'dataset_path', dataset)} "
                    f"({self.split.name} split), which has {length}"
                )

    def _load_counts(self) -> int:
        arrays = self._cache.load(["counts"])
        if arrays is None or not self.order.adopt_counts(arrays["counts"]):
            return 0
        return len(arrays["counts"])

    def _save_counts(self) -> None:
        """Stores the counts from time to time. One process does it, since all workers and ranks compute the same
        counts."""
        known = self.order.known_counts
        if len(known) < self._saved_blocks + _BLOCKS_BETWEEN_SAVES or self.config.path_to_cache is None:
            return
        worker = torch.utils.data.get_worker_info()
        if is_first_rank() and (worker is None or worker.id == 0):
            self._cache.save({"counts": np.array(known)})
        self._saved_blocks = len(known)
