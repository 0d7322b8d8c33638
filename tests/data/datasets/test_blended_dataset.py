"""megatron/data/datasets/blended_dataset.py: items of a blend, lengths that do not suffice, counts kept for later."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.data.datasets import blended_dataset
from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.utils import Split


class Numbers:
    """A dataset of `length` items that say where they come from."""

    index_split = Split.train

    def __init__(self, number, length):
        self.number, self.length = number, length
        self.dataset_path = f"numbers{number}"

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        return {"place": (self.number, idx), "sample_id": torch.tensor(-1 if idx is None else idx)}


def config(path_to_cache=None):
    return SimpleNamespace(path_to_cache=path_to_cache)


def test_items_name_dataset_and_sample():
    blend = BlendedDataset([Numbers(0, 100), Numbers(1, 100)], [30, 70], 50, config())
    assert blend.weights == [0.3, 0.7]
    assert len(blend) == 50
    for i in range(50):
        item = blend[i]
        assert item["place"] == (blend.dataset_index[i], blend.dataset_sample_index[i])
        assert item["dataset_id"] == blend.dataset_index[i]
        assert item["sample_id"] == i
    assert blend[None]["place"] == (blend.dataset_index[0], None)
    assert blend[None]["sample_id"] == -1
    with pytest.raises(IndexError, match="sample 50 requested, there are 50"):
        blend[50]
    part = blend.indices(10, 20)
    assert np.array_equal(part.dataset_index, blend.dataset_index[10:20])


def test_every_sample_once_without_weights():
    blend = BlendedDataset([Numbers(0, 7), Numbers(1, 0), Numbers(2, 3)], None, None, config())
    assert len(blend) == 10
    places = {blend[i]["place"] for i in range(10)}
    assert places == {(0, i) for i in range(7)} | {(2, i) for i in range(3)}


def test_a_dataset_with_too_few_samples_is_named_at_once():
    BlendedDataset([Numbers(0, 30), Numbers(1, 70)], [30, 70], 100, config())
    with pytest.raises(IndexError, match=r"draws 30 from numbers0 .* which has 29"):
        BlendedDataset([Numbers(0, 29), Numbers(1, 70)], [30, 70], 100, config())


@pytest.mark.parametrize(
    ("weights", "size", "message"),
    [([1], 10, "1 weights for a blend of 2"), ([1, 2], None, "neither"), (None, 5, "neither"), ([-1, 2], 5, "-1")],
)
def test_what_does_not_fit_together(weights, size, message):
    with pytest.raises(UserError, match=message):
        BlendedDataset([Numbers(0, 10), Numbers(1, 10)], weights, size, config())


def test_counts_are_kept_for_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(blended_dataset, "_BLOCKS_BETWEEN_SAVES", 4)
    parts, weights, size = [Numbers(0, 10**6), Numbers(1, 10**6)], [0.31, 0.69], 500_000
    first = BlendedDataset(parts, weights, size, config(tmp_path))
    assert not list(tmp_path.iterdir()), "nothing is written before something is known"
    first[5 * first.order.block]
    resumed = BlendedDataset(parts, weights, size, config(tmp_path))
    assert len(resumed.order.known_counts) == len(first.order.known_counts) >= 5
    other = BlendedDataset(parts, [0.32, 0.68], size, config(tmp_path))
    assert len(other.order.known_counts) == 1
    fresh = BlendedDataset(parts, weights, size, config())
    for i in (0, 80_000, 90_001, 400_000):
        assert resumed[i]["place"] == fresh[i]["place"]
