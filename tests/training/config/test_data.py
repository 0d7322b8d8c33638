"""Rules of the data flags."""

import pytest
from support.command_lines import problems_of_config

from megatron.training.config.data import DataConfig


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"seq_length": 0}, "--seq-length 0 must be at least 1"),
        ({"num_workers": -1}, "--num-workers -1 must be at least 0"),
        ({"num_workers": 9999999}, "--num-workers 9999999: each rank would start so many processes; at most 1024"),
        ({"data_path": ["x"]}, "--data-path and --mock-data say in 2 ways where data is; give one"),
        ({"mock_data": False, "data_path": []}, "--data-path: a prefix is missing"),
        (
            {"mock_data": False, "valid_data_path": ["x"], "split": "9,1,0"},
            "--split 9,1,0 does not go with --valid-data-path",
        ),
        ({"split": "90,20,x"}, "--split 90,20,x: 'x' is not a number"),
    ],
)
def test_impossible_values(values: dict[str, object], problem: str) -> None:
    found = problems_of_config(DataConfig, **{**GOOD, **values})
    assert len(found) == 1 and found[0].startswith(problem), found


GOOD: dict[str, object] = {"seq_length": 8, "mock_data": True}


def test_possible_values_are_no_problem() -> None:
    assert problems_of_config(DataConfig, **GOOD) == []


def test_the_paths_of_single_splits_are_one_source() -> None:
    config = DataConfig(seq_length=8, train_data_path=["a"], valid_data_path=["b"])
    assert config.sources() == ["train_data_path"]
