"""Rules of the flags about faults and signals."""

import signal

import pytest
from support.command_lines import problems_of_config

from megatron.training.config.resilience import ResilienceConfig


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"error_injection_rate": -1}, "--error-injection-rate -1 must be at least 0"),
        ({"loss_spike_z_score": 0.0}, "--loss-spike-z-score 0.0 must be above 0"),
        ({"loss_spike_history": 1}, "--loss-spike-history 1 must be at least 2"),
        ({"loss_spike_limit": 0}, "--loss-spike-limit 0 must be at least 1"),
        ({"loss_spike_rewind_window": 0}, "--loss-spike-rewind-window 0 must be at least 1"),
        ({"exit_signal": signal.SIGKILL}, "--exit-signal SIGKILL cannot be caught by any program"),
    ],
)
def test_impossible_values(values: dict[str, object], problem: str) -> None:
    found = problems_of_config(ResilienceConfig, **{**GOOD, **values})
    assert len(found) == 1 and found[0].startswith(problem), found


GOOD: dict[str, object] = {}


def test_possible_values_are_no_problem() -> None:
    assert problems_of_config(ResilienceConfig, **GOOD) == []
