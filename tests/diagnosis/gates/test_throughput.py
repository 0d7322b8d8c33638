"""Tokens per second and GPU against a target."""

import pytest

from megatron.diagnosis.gates.throughput import judge_throughput, speeds
from megatron.diagnosis.gates.verdict import Outcome
from megatron.training.log.jsonl import MetricsHistory


def history(*intervals: tuple[int, float]) -> MetricsHistory:
    lines, iteration = [], 100
    for steps, speed in intervals:
        for _ in range(steps):
            iteration += 1
            lines.append({"iteration": iteration, "tokens per second": speed})
    return MetricsHistory(lines)


def test_speeds_are_per_gpu_and_leave_the_warm_up_out() -> None:
    found = speeds(history((1, 10.0), (4, 500.0), (5, 800.0), (5, 1600.0)), gpus=8, warmup_steps=5)
    assert found == [(5, 100.0), (5, 200.0)]


def test_an_interval_that_began_in_the_warm_up_is_left_out() -> None:
    assert speeds(history((1, 10.0), (10, 500.0), (5, 800.0)), gpus=1, warmup_steps=5) == [(5, 800.0)]


@pytest.mark.parametrize(("speed", "outcome"), [(1000.0, Outcome.PASS), (990.0, Outcome.UNSURE), (900.0, Outcome.FAIL)])
def test_the_median_decides(speed: float, outcome: Outcome) -> None:
    verdict = judge_throughput([(3, speed * 0.9), (10, speed), (3, 1.1 * speed)], 1000.0)
    assert verdict.outcome is outcome and verdict.figures["median tokens/s/GPU"] == speed


def test_one_slow_interval_does_not_decide() -> None:
    assert judge_throughput([(10, 1000.0), (3, 10.0)], 999.0).outcome is Outcome.PASS


def test_few_steps_are_not_judged() -> None:
    assert judge_throughput([(4, 1000.0)], 10.0).outcome is Outcome.UNSURE
    assert judge_throughput([], 10.0).outcome is Outcome.UNSURE
