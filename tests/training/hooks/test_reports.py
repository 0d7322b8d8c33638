"""Hooks that print reports."""

import pytest
import torch

from megatron.core.rerun_state_machine import destroy_rerun_state_machine, initialize_rerun_state_machine
from megatron.core.straggler_detector import StragglerDetector
from megatron.training.hooks.reports import RerunReport, StragglerReport


def test_slow_ranks_are_named_at_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    StragglerDetector().configure(1, 0, enabled=True)
    hook = StragglerReport(2)
    for iteration in (1, 2):
        with StragglerDetector():
            pass
        hook.after_step(iteration)
    StragglerDetector().configure(1, 0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("iteration 2: stragglers: forward step: fastest rank 0")


def test_changed_results_are_named_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    machine = initialize_rerun_state_machine("report_stats")
    numbers = iter(range(2))

    def compute() -> None:
        machine.validate_result(torch.tensor(float(next(numbers))), torch.isnan, "loss")

    machine.step(compute, lambda: True)
    RerunReport().on_exit(1)
    destroy_rerun_state_machine()
    assert "'loss': 1 of 1 results changed" in capsys.readouterr().out
