"""Iterators over the splits of a run, for one rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.command_lines import configured

from megatron.core.exceptions import UserError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid
from megatron.training.data.batch import collate_gpt
from megatron.training.data.splits import build_splits, collate_of
from megatron.training.state import TrainState

ENVIRONMENT: Any = SimpleNamespace(groups=ProcessGroupCollection.from_grid(RankGrid(1), 0), device=torch.device("cpu"))


class Numbers:
    """Items that are their index."""

    def __init__(self, length: int = 40) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def build(flags: str = "", *datasets: Any, **counts: int) -> Any:
    config = configured(f"--num-workers 0 {flags}")
    return build_splits(config, ENVIRONMENT, TrainState(**counts), datasets)


def next_of(data: Any) -> list[int]:
    data.begin(0)
    return next(data).tolist()


def test_splits_continue_at_the_counts_of_the_run() -> None:
    splits = build("", Numbers(), Numbers(), Numbers(), iteration=3, consumed_train_samples=6, consumed_valid_samples=4)
    assert [next_of(data) for data in (splits.train, splits.valid, splits.test)] == [[6, 7], [4, 5], [0, 1]]
    splits.close()


def test_a_split_without_data_or_use_is_none() -> None:
    splits = build("", Numbers(), None, Numbers())
    assert splits.valid is None and splits.test is not None
    splits = build("--eval-iters 0", Numbers(), Numbers(), Numbers())
    assert splits.valid is None and splits.test is None


def test_training_data_are_required() -> None:
    with pytest.raises(UserError, match="there is no training data"):
        build("", None, Numbers(), None)
    assert build("--skip-train", None, Numbers(), None).valid is not None


def test_a_finished_run_reads_nothing() -> None:
    splits = build("", Numbers(4), None, None, iteration=10, consumed_train_samples=20)
    with pytest.raises(StopIteration):
        next(splits.train)


def test_too_little_training_data_is_an_error() -> None:
    with pytest.raises(UserError):
        next_of(build("", Numbers(4), None, None, iteration=3, consumed_train_samples=6).train)


def test_items_of_other_data_sets_use_torchs_collation() -> None:
    made = collate_of(Numbers())([{"x": torch.tensor(1)}, {"x": torch.tensor(2)}])
    assert made["x"].tolist() == [1, 2]


def test_items_of_this_package_become_batches(build_dataset: Any) -> None:
    assert collate_of(build_dataset(4)) is collate_gpt


def test_the_whole_validation_set_is_read_anew_each_time() -> None:
    class Padded(Numbers):
        def __getitem__(self, index: int | None) -> torch.Tensor:
            return torch.tensor(-1 if index is None else index)

    splits = build(
        "--full-validation --eval-global-batch-size 4", Numbers(), Padded(10), Numbers(), consumed_valid_samples=8
    )
    assert splits.valid is not None and splits.whole_valid.num_samples == 10
    for _ in range(2):
        data = splits.whole_valid.open()
        data.begin(0)
        assert [next(data).tolist() for _ in range(6)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [-1, -1]]
        assert next(data, None) is None
    assert build("", Numbers(), Numbers(), Numbers()).whole_valid is None
