"""The memory gate's verdict about peaks, and about finished runs."""

from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.diagnosis.gates.finished_run import FinishedRun
from megatron.diagnosis.gates.memory import GIB, PeakOfRank, judge_memory_of, judge_peaks
from megatron.diagnosis.gates.verdict import Outcome
from megatron.training.log.jsonl import MetricsHistory


def gpu(rank: int, peak: float, outside: float = 0.0) -> PeakOfRank:
    return PeakOfRank(rank, "H100", round(peak * GIB), 80 * GIB, round(outside * GIB), 3, 2)


def test_the_fullest_rank_decides_with_what_is_outside_torch() -> None:
    peaks = [gpu(0, 50), gpu(1, 66, 3.0)]
    verdict = judge_peaks(peaks, 85.0, None, True)
    assert verdict.outcome is Outcome.FAIL and verdict.figures["percent"] == pytest.approx(100 * 69 / 80)
    assert "rank 1 on H100" in verdict.reason and "the most uneven routing" in verdict.reason
    assert judge_peaks(peaks, 90.0, None, True).outcome is Outcome.PASS


def test_another_memory_can_be_given() -> None:
    assert judge_peaks([gpu(0, 50)], 85.0, 48.0, True).outcome is Outcome.FAIL


def test_ranks_on_a_cpu_share_its_memory() -> None:
    peaks = [PeakOfRank(rank, "cpu", 3 * GIB, 8 * GIB, 0, 3) for rank in range(2)]
    verdict = judge_peaks(peaks, 70.0, None, True)
    assert verdict.outcome is Outcome.FAIL and verdict.figures["percent"] == 75.0
    assert "resident memory of 2 ranks on a CPU" in verdict.reason and "routing" not in verdict.reason


def finished(line: dict[str, float]) -> FinishedRun:
    return FinishedRun(Path("metrics.jsonl"), MetricsHistory([{"iteration": 1, **line}]))


def test_a_finished_run_can_fail_but_not_pass() -> None:
    run = finished({"peak device memory (MB)": 76 * 1024.0})
    assert judge_memory_of(run, 85.0, 80.0).outcome is Outcome.FAIL
    assert judge_memory_of(run, 96.0, 80.0).outcome is Outcome.UNSURE


def test_what_a_finished_run_does_not_tell() -> None:
    with pytest.raises(UserError, match="give --memory-gib"):
        judge_memory_of(finished({}), 85.0, None)
    with pytest.raises(UserError, match="has no memory"):
        judge_memory_of(finished({}), 85.0, 80.0)
