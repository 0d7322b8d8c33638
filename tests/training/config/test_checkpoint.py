"""Rules of the checkpoint flags."""

import pytest
from support.command_lines import problems_of_config

from megatron.training.config.checkpoint import CheckpointConfig


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"save_interval": 0}, "--save-interval 0 must be at least 1"),
        ({"keep_last": 0}, "--keep-last 0 must be at least 1"),
        ({"load": "x", "ckpt_step": -1}, "--ckpt-step -1 must be at least 0"),
        ({"finetune": True}, "--finetune needs --load: the folder to load from"),
        ({"non_persistent_save_interval": 0}, "--non-persistent-save-interval 0 must be at least 1"),
        (
            {"non_persistent_save_interval": 2, "non_persistent_global_ckpt_dir": "./x"},
            "--non-persistent-global-ckpt-dir ./x is the folder of --save",
        ),
        (
            {"load": "x", "finetune": True, "override_ckpt_iteration": 3},
            "--override-ckpt-iteration 3: with --finetune a run begins at iteration 0",
        ),
    ],
)
def test_impossible_values(values: dict[str, object], problem: str) -> None:
    found = problems_of_config(CheckpointConfig, **{**GOOD, **values})
    assert len(found) == 1 and found[0].startswith(problem), found


GOOD: dict[str, object] = {"save": "x"}


def test_possible_values_are_no_problem() -> None:
    assert problems_of_config(CheckpointConfig, **GOOD) == []
