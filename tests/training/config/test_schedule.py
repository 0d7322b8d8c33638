"""Rules of the learning rate schedule."""

import pytest
from support.command_lines import problems_of_config

from megatron.training.config.schedule import ScheduleConfig


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"lr_decay_iters": 0}, "--lr-decay-iters 0 must be at least 1"),
        ({"lr_warmup_iters": -1}, "--lr-warmup-iters -1 must be at least 0"),
        ({"lr_warmup_fraction": 1.0}, "--lr-warmup-fraction 1.0 must be at least 0 and less than 1"),
        (
            {"lr_warmup_fraction": 0.1, "lr_warmup_samples": 3},
            "--lr-warmup-fraction 0.1 and --lr-warmup-samples 3 say how long to warm up in 2 ways",
        ),
        (
            {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1},
            "--weight-decay-incr-style cosine needs --end-weight-decay",
        ),
        (
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.05},
            "--end-weight-decay 0.05 is less than --start-weight-decay 0.1",
        ),
        (
            {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict",
        ),
    ],
)
def test_impossible_values(values: dict[str, object], problem: str) -> None:
    found = problems_of_config(ScheduleConfig, **{**GOOD, **values})
    assert len(found) == 1 and found[0].startswith(problem), found


GOOD: dict[str, object] = {}


def test_possible_values_are_no_problem() -> None:
    assert problems_of_config(ScheduleConfig, **GOOD) == []
