"""Rules of the logging flags."""

import pytest
from support.command_lines import problems_of_config

from megatron.training.config.logging import LoggingConfig


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"log_interval": 0}, "--log-interval 0 must be at least 1"),
        ({"profile_step_start": -1}, "--profile-step-start -1 must be at least 0"),
        ({"profile": True, "profile_step_end": 5}, "--profile-step-end 5 must be larger than --profile-step-start 10"),
    ],
)
def test_impossible_values(values: dict[str, object], problem: str) -> None:
    found = problems_of_config(LoggingConfig, **{**GOOD, **values})
    assert len(found) == 1 and found[0].startswith(problem), found


GOOD: dict[str, object] = {}


def test_possible_values_are_no_problem() -> None:
    assert problems_of_config(LoggingConfig, **GOOD) == []
