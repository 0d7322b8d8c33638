"""The rerun state machine: what it does about a rejected result, alone and in a step that can be computed again."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks

from megatron.core.exceptions import UserError
from megatron.core.health.rerun_state_machine import (
    RerunErrorInjector,
    RerunMode,
    RerunStateMachine,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

NAN, ONE = torch.tensor(float("nan")), torch.tensor(1.0)


def step_of(machine: RerunStateMachine, results: list[torch.Tensor], **options: Any) -> Callable[[], torch.Tensor]:
    """A step whose loss is the next of `results`."""
    left = iter(results)

    def compute() -> torch.Tensor:
        result = next(left)
        options.setdefault("rejection_func", torch.isnan)
        machine.validate_result(result, message="found NaN", **options)
        return result

    return compute


def test_outside_a_loop_a_rejected_result_is_an_error_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    machine = RerunStateMachine()
    machine.validate_result(ONE, torch.isnan, "found NaN")
    with pytest.raises(RuntimeError, match=r"rank 0 .*: found NaN \(value nan\)"):
        machine.validate_result(NAN, torch.isnan, "found NaN")
    machine.validate_result(3.0, lambda value: value > 2, "too large", fatal=False)
    assert "too large (value 3)" in capsys.readouterr().out


def test_a_transient_fault_is_reported_and_the_second_result_used(capsys: pytest.CaptureFixture[str]) -> None:
    machine = RerunStateMachine(RerunMode.VALIDATE_RESULTS)
    assert machine.step(step_of(machine, [NAN, ONE]), lambda: True) == 1.0
    assert "computed again: value 1 is accepted: a transient fault" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("second", "sentence"), [(NAN, "the same again: the data"), (torch.tensor([NAN, ONE]), "an algorithm that is not")]
)
def test_a_lasting_rejection_ends_the_run(second: torch.Tensor, sentence: str) -> None:
    machine = RerunStateMachine(RerunMode.VALIDATE_RESULTS)
    first = NAN if second is NAN else torch.tensor([ONE, NAN])
    with pytest.raises(RuntimeError, match=sentence):
        machine.step(step_of(machine, [first, second]), lambda: True)


def test_what_cannot_be_computed_again_and_what_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    machine = RerunStateMachine(RerunMode.VALIDATE_RESULTS)
    with pytest.raises(RuntimeError, match=r"found NaN \(value nan\)$"):
        machine.step(step_of(machine, [NAN]), lambda: False)
    machine.step(step_of(machine, [NAN, NAN], fatal=False), lambda: True)
    machine = RerunStateMachine(RerunMode.VALIDATE_RESULTS, leaves_non_finite=True)
    machine.step(step_of(machine, [NAN, NAN]), lambda: True)
    with pytest.raises(RuntimeError, match="value 1"):
        machine.step(step_of(machine, [ONE, ONE], rejection_func=lambda value: value == 1), lambda: True)
    assert capsys.readouterr().out.count("found NaN") == 4
    off = RerunStateMachine(RerunMode.DISABLED)
    with pytest.raises(RuntimeError, match="found NaN"):
        off.step(step_of(off, [NAN]), lambda: True)


def test_a_script_that_checks_nothing_costs_nothing() -> None:
    machine = RerunStateMachine(RerunMode.REPORT_DETERMINISM_STATS)
    assert machine.step(lambda: 5, lambda: True) == 5 and machine.checks_results is False and machine.report() == []


def test_differences_of_two_computations_are_reported() -> None:
    machine = RerunStateMachine(RerunMode.REPORT_DETERMINISM_STATS)
    for second in (1.0, 1.25):
        machine.step(step_of(machine, [ONE, torch.tensor(second)]), lambda: True)
    (line,) = machine.report()
    assert "1 of 2 results changed when computed again, by up to 2.500e-01" in line


def test_large_and_spiky_values() -> None:
    machine = RerunStateMachine()
    values = [2.0, 3.0, 29.0, 30.0, float("nan")]
    large = [machine.is_unexpectedly_large(torch.tensor(v), 10, "loss", num_samples=2) for v in values]
    assert large == [False, False, False, True, False]
    assert not machine.is_unexpectedly_large(torch.tensor(99.0), 10, "loss", num_samples=2, resample=True)
    assert [machine.is_spiky_loss(torch.tensor(v), 0.2) for v in (1.0, 1.1, 1.4)] == [False, False, True]


@pytest.fixture
def process() -> Iterator[None]:
    destroy_rerun_state_machine()
    yield
    destroy_rerun_state_machine()


@pytest.mark.usefixtures("process")
def test_the_machine_of_the_process() -> None:
    assert get_rerun_state_machine() is get_rerun_state_machine()
    assert get_rerun_state_machine().mode is RerunMode.DISABLED
    made = initialize_rerun_state_machine(mode="report_stats")
    assert get_rerun_state_machine() is made and made.mode is RerunMode.REPORT_DETERMINISM_STATS
    with pytest.raises(UserError, match="choose from disabled, validate_results, report_stats"):
        initialize_rerun_state_machine("often")


def _one_of_two() -> tuple[int, str]:
    rank, computed, machine = torch.distributed.get_rank(), [0], RerunStateMachine(RerunMode.VALIDATE_RESULTS)

    def compute() -> None:
        computed[0] += 1
        if rank == 1:  # the last stage
            machine.validate_result(torch.tensor(7.0), lambda value: value > 5, "too large")

    try:
        machine.step(compute, lambda: True)
    except RuntimeError as error:
        return computed[0], str(error)
    return computed[0], ""


def test_all_ranks_compute_again_and_end_together() -> None:
    first, second = run_on_ranks(_one_of_two, 2)
    assert first == (2, "another rank rejected a result of this step; its lines say which")
    assert second[0] == 2 and second[1].startswith("rank 1") and "too large (value 7)" in second[1]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("transient_error", None),
        ("correct_result", r"injected as correct_result \(value 1\); computed again: the same again"),
        ("persistent_error", r"injected as persistent_error \(value 2\); computed again: the same again"),
    ],
)
def test_injected_errors(kind: str, sentence: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    machine = RerunStateMachine(RerunMode.VALIDATE_RESULTS, RerunErrorInjector(1, kind))
    if sentence is None:
        assert machine.step(step_of(machine, [ONE, ONE]), lambda: True) == 1.0
        assert "(value 2); computed again: value 1 is accepted: a transient fault" in capsys.readouterr().out
    else:
        with pytest.raises(RuntimeError, match=sentence):
            machine.step(step_of(machine, [ONE, ONE]), lambda: True)
    machine.validate_result(ONE, torch.isnan, "found NaN")  # in an evaluation: nothing is injected


def test_losses_are_validated_where_the_script_validates_nothing() -> None:
    machine = RerunStateMachine(RerunMode.VALIDATE_RESULTS, RerunErrorInjector(1, "persistent_error"))

    def compute() -> list[dict[str, torch.Tensor]]:
        reports = [{"lm loss": torch.tensor([3.0, 1.0])}]
        machine.validate_losses(reports)
        return reports

    with pytest.raises(RuntimeError, match="lm loss is rejected, injected"):
        machine.step(compute, lambda: True)
    machine.injector = None
    machine.validate_losses([{"lm loss": NAN}])  # nothing to inject: nothing is validated


def test_a_second_computation_may_validate_more_results() -> None:
    """An error is injected into the first result alone, again in the second computation."""
    machine = RerunStateMachine(RerunMode.VALIDATE_RESULTS, RerunErrorInjector(1, "transient_error"))
    counts = iter((1, 2))

    def compute() -> str:
        for _ in range(next(counts)):
            machine.validate_result(torch.tensor(1.0), torch.isnan, "loss")
        return "done"

    assert machine.step(compute, lambda: True) == "done" and next(counts, None) is None
