"""The resume gate with runs of pretrain_gpt.py, and of a script whose counter no checkpoint keeps."""

import sys
from pathlib import Path

import pytest
from support.programs import python
from support.runs import TINY, write_documents

from megatron.core.exceptions import UserError
from megatron.diagnosis.gates.resume import ResumePlan, judge_resume
from megatron.diagnosis.gates.user_run import UserRun, read_user_run
from megatron.diagnosis.gates.verdict import Outcome

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a tiny run. The gate starts its processes as forks of one that has imported everything."""
    monkeypatch.setattr(sys, "executable", python())
    return f"{TINY} --data-path {write_documents(tmp_path / 'data')} --train-iters 30".split()


def run_of(script: str, flags: list[str]) -> UserRun:
    return read_user_run([str(ROOT / script), *flags], ROOT / "pretrain_gpt.py")


def test_a_run_goes_on_as_if_it_had_not_stopped(flags: list[str], tmp_path: Path) -> None:
    verdict = judge_resume(run_of("pretrain_gpt.py", flags), ResumePlan(4, 2), tmp_path / "gate")
    assert verdict.outcome is Outcome.PASS, verdict.line
    assert "equal to the bit" in verdict.reason and not (tmp_path / "gate/again").exists()


@pytest.mark.slow
def test_another_layout_agrees_to_rounding(flags: list[str], tmp_path: Path) -> None:
    plan = ResumePlan(4, 2, (("--tensor-model-parallel-size", "2"),))
    verdict = judge_resume(run_of("pretrain_gpt.py", flags), plan, tmp_path / "gate")
    assert verdict.outcome is Outcome.PASS and "--tensor-model-parallel-size 2 within 0.0001" in verdict.reason
    strict = ResumePlan(4, 2, plan.layouts, tolerance=1e-15)
    verdict = judge_resume(run_of("pretrain_gpt.py", flags), strict, tmp_path / "strict")
    assert verdict.outcome is Outcome.FAIL and verdict.kinds == ("layout",)


def test_a_counter_that_no_checkpoint_keeps_is_caught(flags: list[str], tmp_path: Path) -> None:
    run = run_of("tests/support/broken_training.py", [*flags, "--fault", "unsaved-counter"])
    verdict = judge_resume(run, ResumePlan(4, 2), tmp_path / "gate")
    assert verdict.outcome is Outcome.FAIL and verdict.kinds == ("state not saved",), verdict.line
    assert verdict.steps == [3] and "first differs in step 3" in verdict.reason


def test_a_run_that_differs_each_time_is_not_judged(flags: list[str], tmp_path: Path) -> None:
    run = run_of("tests/support/broken_training.py", [*flags, "--fault", "not-repeatable"])
    verdict = judge_resume(run, ResumePlan(3, 1), tmp_path / "gate")
    assert verdict.outcome is Outcome.UNSURE and verdict.kinds == ("not repeatable",), verdict.line


def test_a_run_that_ends_sooner_is_refused(flags: list[str], tmp_path: Path) -> None:
    run = run_of("pretrain_gpt.py", [*flags, "--train-iters", "2"])
    with pytest.raises(UserError, match="the run ended at step 2 of 4 \\(its flags end it sooner\\)"):
        judge_resume(run, ResumePlan(4, 2), tmp_path / "gate")


def test_the_checkpoint_is_before_the_end() -> None:
    with pytest.raises(UserError, match="--at 5 must be between 1 and --steps 5 less 1"):
        ResumePlan(5, 5)
