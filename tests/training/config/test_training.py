"""Rules of the flags of training and evaluation."""

import pytest
from support.command_lines import problems_of_config

from megatron.training.config.training import EvaluationConfig, TrainingConfig


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"micro_batch_size": 0}, "--micro-batch-size 0 must be at least 1"),
        ({"exit_interval": 0}, "--exit-interval 0 must be at least 1"),
        ({"train_samples": 15}, "--train-samples 15 is less than one batch of --global-batch-size 16"),
        (
            {"train_samples": 99, "rampup_batch_size": [4, 0, 100]},
            "--rampup-batch-size 4 0 100: start, increment and samples must be at least 1",
        ),
        (
            {"train_samples": 99, "rampup_batch_size": [16, 4, 100]},
            "--rampup-batch-size 16 4 100 begins at or above --global-batch-size 16",
        ),
        (
            {"train_samples": 99, "rampup_batch_size": [2, 4, 100]},
            "--rampup-batch-size 2 4 100: from 2 in steps of 4 the batch does not reach",
        ),
    ],
)
def test_impossible_values(values: dict[str, object], problem: str) -> None:
    found = problems_of_config(TrainingConfig, **{**GOOD, **values})
    assert len(found) == 1 and found[0].startswith(problem), found


GOOD: dict[str, object] = {"micro_batch_size": 2, "global_batch_size": 16, "train_iters": 3}


def test_possible_values_are_no_problem() -> None:
    assert problems_of_config(TrainingConfig, **GOOD) == []


def test_evaluation() -> None:
    assert problems_of_config(EvaluationConfig) == []
    assert problems_of_config(EvaluationConfig, eval_interval=0) == ["--eval-interval 0 must be at least 1"]
    assert problems_of_config(EvaluationConfig, eval_iters=-1) == ["--eval-iters -1 must be at least 0"]
    assert problems_of_config(EvaluationConfig, skip_train=True, eval_iters=0) == [
        "--skip-train with --eval-iters 0 leaves nothing to do"
    ]
