"""Iterators over the splits of a run, for one rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.command_lines import SMALL, configured, problems_of, without

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.training.data.batch import CollatedDataset, collate_gpt
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


WITH_DATA = SMALL.replace("--mock-data", "--train-data-path t")


def build(flags: str = "", *datasets: Any, base: str = SMALL, **counts: int) -> Any:
    config = configured(f"--num-workers 0 {flags}", base=base)
    return build_splits(config, ENVIRONMENT, TrainState(**counts), datasets)


def next_of(data: Any) -> list[int]:
    data.begin(0)
    return next(data).tolist()


def test_splits_continue_at_the_counts_of_the_run() -> None:
    counts = {"iteration": 3, "consumed_train_samples": 6, "consumed_valid_samples": 4}
    for flags, valid in (("", [0, 1]), ("--eval-fresh-samples", [4, 5])):
        splits = build(flags, Numbers(), Numbers(), Numbers(), **counts)
        assert [next_of(data) for data in (splits.train, splits.valid, splits.test)] == [[6, 7], valid, [0, 1]]
        splits.close()


def test_a_split_without_data_or_use_is_none() -> None:
    splits = build("", Numbers(), None, Numbers())
    assert splits.valid is None and splits.test is not None
    splits = build("--eval-iters 0", Numbers(), Numbers(), Numbers())
    assert splits.valid is None and splits.test is None


def test_iterables_of_a_script_are_used_as_they_are() -> None:
    batches = [torch.tensor([number]) for number in range(4)]
    splits = build("--dataloader-type external", iter(batches), [batches[3]], None, consumed_train_samples=2)
    assert [next_of(splits.train) for _ in range(2)] == [[0], [1]]  # the script finds the place of a resumed run
    assert next_of(splits.valid) == [3] and splits.test is None
    for data, message in (
        ((5, None, None), "the training data of the script's provider is a int, not an iterable of this rank's"),
        ((batches, 5, None), "the validation data of the script's provider is a int"),
        ((None, None, None), "the script's datasets provider returns no training data"),
    ):
        with pytest.raises(UserError, match=message):
            build("--dataloader-type external", *data)


def test_flags_of_iterables() -> None:
    assert problems_of("--dataloader-type external", base=without("--mock-data")) == []
    rewind = "--loss-spike-action rewind --save x --save-interval 1"
    assert problems_of(f"--dataloader-type external --full-validation {rewind}") == [
        "--loss-spike-action rewind reads data again, which --dataloader-type external cannot; skip works",
        "--full-validation needs data sets, whose length is known; --dataloader-type external has iterables",
    ]


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
    (whole,) = splits.valid_sets
    assert splits.valid is not None and (whole.num_samples, whole.name) == (10, None)
    for _ in range(2):
        data = whole.open()
        data.begin(0)
        assert [next(data).tolist() for _ in range(6)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [-1, -1]]
        assert next(data, None) is None
    assert build("", Numbers(), Numbers(), Numbers()).valid_sets == ()


@pytest.mark.parametrize(("fresh", "first", "second"), [("", [0, 1], [0, 1]), ("--eval-fresh-samples", [4, 5], [6, 7])])
def test_each_validation_set_is_read_again_or_continues_or_is_read_whole(
    fresh: str, first: list[int], second: list[int]
) -> None:
    flags = "--multiple-validation-sets --valid-data-path a b c"
    sets = [Numbers(10), None, Numbers(20)]
    splits = build(f"{flags} {fresh}", Numbers(), sets, Numbers(), base=WITH_DATA, consumed_valid_samples=4)
    assert [(one.name, one.num_samples) for one in splits.valid_sets] == [("0", None), ("2", None)]
    for expected in (first, second):
        for one in splits.valid_sets:
            one.open().restart()
            assert next_of(one.open()) == expected
    splits.close()
    named = f"{flags} --full-validation --validation-set-names wiki code law"
    splits = build(named, Numbers(), sets, Numbers(), base=WITH_DATA, consumed_valid_samples=4)
    assert [(one.name, one.num_samples) for one in splits.valid_sets] == [("wiki", 10), ("law", 20)]
    assert next_of(splits.valid_sets[1].open()) == [0, 1]
    assert build(flags, Numbers(), [None, None], Numbers(), base=WITH_DATA).valid is None


def test_validation_sets_of_a_script_are_a_list() -> None:
    flags = "--multiple-validation-sets --valid-data-path a b"
    with pytest.raises(UserError, match="must return a list"):
        build(flags, Numbers(), Numbers(), Numbers(), base=WITH_DATA)
    with pytest.raises(UserError, match="3 names for 2 validation sets"):
        names = " --validation-set-names a b c --valid-data-path a b c"
        build(flags + names, Numbers(), [Numbers(), Numbers()], Numbers(), base=WITH_DATA)


def test_a_data_set_may_bring_its_own_collate_function() -> None:
    splits = build("", CollatedDataset(Numbers(), list), Numbers(), Numbers())
    assert next(splits.train) == [torch.tensor(0), torch.tensor(1)]
    splits.close()
