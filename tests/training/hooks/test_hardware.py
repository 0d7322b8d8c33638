"""Hooks that print reports."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.command_lines import configured

from megatron.core.distributed.replica_check import ReplicaDifference
from megatron.core.health.rerun_state_machine import destroy_rerun_state_machine, initialize_rerun_state_machine
from megatron.core.health.straggler_detector import StragglerDetector
from megatron.training.hooks import hardware
from megatron.training.hooks.hardware import ReplicaCheck, RerunReport, StragglerReport
from megatron.training.setup.watching import timed_forward_step


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


def test_a_detector_that_starts_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    """--disable-straggler-on-startup: nothing is measured or printed until a script's code enables the detector."""
    config = configured("--log-straggler --disable-straggler-on-startup")
    timed_forward_step(lambda: None, config, SimpleNamespace(world_size=1, rank=0))()  # type: ignore[arg-type]
    StragglerReport(1).after_step(1)
    assert capsys.readouterr().out == "" and StragglerDetector().configured
    StragglerDetector().configure(1, 0)


def test_changed_results_are_named_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    machine = initialize_rerun_state_machine("report_stats")
    numbers = iter(range(2))

    def compute() -> None:
        machine.validate_result(torch.tensor(float(next(numbers))), torch.isnan, "loss")

    machine.step(compute, lambda: True)
    RerunReport().on_exit(1)
    destroy_rerun_state_machine()
    assert "'loss': 1 of 1 results changed" in capsys.readouterr().out


def test_replicas_are_compared_at_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    model: list[Any] = []
    compared: list[int] = []

    def differing_units(chunks: Any) -> list[ReplicaDifference]:
        assert chunks is model
        compared.append(1)
        return (
            [] if len(compared) < 3 else [ReplicaDifference("layers.0", (1,)), ReplicaDifference("output_layer", (0,))]
        )

    monkeypatch.setattr(hardware, "differing_units", differing_units)
    hook = ReplicaCheck(model, 2)
    for iteration in range(1, 6):
        hook.after_step(iteration)
    assert len(compared) == 2
    with pytest.raises(RuntimeError) as failure:
        hook.after_step(6)
    assert str(failure.value) == (
        "after iteration 6 the weights of layers.0 and of 1 more units differ between data parallel replicas: "
        "replica 1 from most others; the hardware of its rank may be broken"
    )
