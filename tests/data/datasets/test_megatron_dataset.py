"""The base class of datasets: what identifies a dataset, and the default of `is_empty`."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.data.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.utils import Split

TOKENIZER = SimpleNamespace(unique_identifiers={"name": "a"})


class Numbers(MegatronDataset):
    """Counts its elements."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> Any:
        return range(10)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        return {"number": idx}


def build(path: str = "x", samples: int | None = 7, split: Split = Split.train, **config: Any) -> Numbers:
    settings = {"random_seed": 1, "sequence_length": 8, "mock": True, "split": "9,1,0", "tokenizer": TOKENIZER} | config
    return Numbers(range(10), path, np.arange(5), samples, split, BlendedMegatronDatasetConfig(**settings))


def test_equal_datasets_have_equal_identifiers() -> None:
    assert build().unique_description_hash == build().unique_description_hash
    assert json.loads(build().unique_description) == json.loads(json.dumps(build().unique_identifiers))


@pytest.mark.parametrize(
    "other",
    [
        {"path": "y"},
        {"samples": 8},
        {"samples": None},
        {"split": Split.valid},
        {"random_seed": 2},
        {"sequence_length": 9},
        {"tokenizer": SimpleNamespace(unique_identifiers={"name": "b"})},
    ],
    ids=str,
)
def test_everything_that_changes_samples_changes_the_hash(other: dict[str, Any]) -> None:
    assert build(**other).unique_description_hash != build().unique_description_hash


def test_the_class_is_an_identifier() -> None:
    class Others(Numbers):
        """Another class with the same samples."""

    dataset = build()
    other = Others(dataset.dataset, dataset.dataset_path, dataset.indices, 7, Split.train, dataset.config)
    assert other.unique_description_hash != dataset.unique_description_hash


def test_a_split_without_elements_is_empty() -> None:
    assert Numbers.is_empty(range(10), [], None, Split.train)
    assert not Numbers.is_empty(range(10), np.arange(1), None, Split.train)
