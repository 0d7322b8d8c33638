"""The base class of datasets, which the builder and blends use."""

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.core.utils.url_keys import hide_keys
from megatron.data.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.data.datasets.index_cache import Arrays, IndexCache, load_array
from megatron.data.datasets.index_format import get_bin_path, get_idx_path
from megatron.data.datasets.object_store import is_url
from megatron.data.datasets.utils import Split


@dataclass(frozen=True)
class _MappedFile:
    """A mapped array in a pickle."""

    path: Path


class MegatronDataset(ABC, torch.utils.data.Dataset):
    """Samples of one split of a low-level dataset, made from some of its elements (sequences or documents).

    Args:
        dataset: the low-level dataset.
        dataset_path: its prefix; None for made-up data.
        indices: the elements of the split.
        num_samples: number of samples requested; None: one pass over the elements.
        index_split: the split.
        config: the run's data configuration.
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: Sequence[int] | np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config

    @functools.cached_property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """Everything that the order of samples depends on, as JSON values. Computed at the first access."""
        return self._identify()

    def _identify(self) -> "OrderedDict[str, Any]":
        tokenizer = self.config.tokenizer
        return OrderedDict(
            {
                "class": type(self).__name__,
                "dataset_path": None if self.dataset_path is None else hide_keys(self.dataset_path),
                "num_samples": self.num_samples,
                "index_split": self.index_split.name,
                "random_seed": self.config.random_seed,
                "sequence_length": self.config.sequence_length,
                "split": self.config.split,
                "split_matrix": self.config.split_matrix,
                "tokenizer": getattr(tokenizer, "unique_identifiers", type(tokenizer).__name__),
            }
        )

    def load_or_build_indices(
        self, names: list[str], valid: Callable[[Arrays], bool], build: Callable[[], Arrays]
    ) -> Arrays:
        """Returns index arrays from the cache. Builds and saves them if the cache has none or `valid` rejects them.

        Indices of made-up data and of data in object stores are cached only in a folder that the config names.
        """
        nowhere = self.dataset_path is None or is_url(self.dataset_path)
        if nowhere and not self.config.path_to_cache:
            return build()
        name = type(self).__name__
        folder = self.config.path_to_cache or Path(f"{self.dataset_path}/cache/{name}_indices")
        cache = IndexCache(folder, f"{name}-{self.index_split.name}", self.unique_description)
        return cache.load_or_build(names, valid, build)

    def __getstate__(self) -> dict[str, object]:
        """Replaces mapped index arrays by their file names, so that another process maps them again."""
        attributes = vars(self).items()
        return {name: _MappedFile(Path(str(v.filename))) if isinstance(v, np.memmap) else v for name, v in attributes}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update({name: load_array(v.path) if isinstance(v, _MappedFile) else v for name, v in state.items()})

    @property
    def shuffled_together(self) -> str | None:
        """Words for the epochs that are shuffled as a whole, if the order of the first samples depends on how many
        samples are requested; otherwise None."""
        return None

    @property
    def unique_description(self) -> str:
        """The identifiers as text."""
        return json.dumps(self.unique_identifiers, indent=4, default=str)

    @property
    def unique_description_hash(self) -> str:
        """An MD5 hash of the description."""
        return hashlib.md5(self.unique_description.encode(), usedforsecurity=False).hexdigest()

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: object) -> int:
        """Returns the number of elements that splits divide."""

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> object:
        """Opens the low-level dataset of a prefix."""

    @staticmethod
    def files_of(prefix: str) -> tuple[str, ...]:
        """Returns the files of a prefix that must exist."""
        return get_idx_path(prefix), get_bin_path(prefix)

    @classmethod
    def is_empty(
        cls,
        low_level_dataset: object,
        indices: Sequence[int] | np.ndarray,
        config: BlendedMegatronDatasetConfig,
        split: Split,
    ) -> bool:
        """Whether a split of these elements contains no samples, even if it is repeated."""
        return len(indices) == 0

    def document_lengths(self, idx: int) -> np.ndarray:
        """Returns the number of tokens of each document of sample `idx`, int64. It reads no tokens."""
        return np.array([self.config.sequence_length])

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, idx: int | None) -> dict[str, Any]: ...
