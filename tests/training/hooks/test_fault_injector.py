"""--fault-injector-*: which rank gets which fault and when, and that it happens."""

import os
import signal
import time
from typing import Any

import pytest
from support.command_lines import configured

from megatron.training.config.resilience import FaultInjectorConfig
from megatron.training.hooks import fault_injector
from megatron.training.hooks.fault_injector import FaultInjector

FLAGS = (
    "--fault-injector-fault-types hang,CRASH --fault-injector-fault-probabilities 0,2 --fault-injector-num-ranks 3 "
    "--fault-injector-mtti-seconds 5 --fault-injector-offset-seconds 100 --fault-injector-delay-start-iteration 2 "
)


def test_all_ranks_draw_the_same() -> None:
    flags = configured(f"{FLAGS} --fault-injector-seed 4").fault_injector
    made = [FaultInjector(flags, rank, 8, seed=rank) for rank in range(8)]
    assert {one.fault for one in made} == {"crash"} and len({(one.ranks, one.delay) for one in made}) == 1
    assert len(made[0].ranks) == 3 and made[0].delay > 100 and made[0].start_iteration == 2
    assert FaultInjector(configured(FLAGS).fault_injector, 0, 8, seed=1).delay != made[0].delay


def injector(fault: str, delay: float = 0.0, **more: Any) -> FaultInjector:
    flags = FaultInjectorConfig(fault_injector_fault_types=fault, fault_injector_fault_delay=delay, **more)
    return FaultInjector(flags, 1, 2, seed=1)


def wait_for(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("nothing happened")


def test_an_exception_of_the_training_thread(capsys: pytest.CaptureFixture[str]) -> None:
    hook = injector("exception", fault_injector_ranks="1", fault_injector_delay_start_iteration=3)
    hook.on_start(0)
    hook.after_step(2)
    assert hook._timer is None
    hook.after_step(3)
    wait_for(lambda: hook._in_training_thread is not None)
    with pytest.raises(RuntimeError, match="injected on purpose"):
        hook.after_step(4)
    said = ["exception 0.0 seconds after iteration 3", "exception now"]
    assert capsys.readouterr().out.splitlines() == [f"fault injector: rank 1: {text}" for text in said]


def test_a_signal_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, signal.Signals]] = []
    monkeypatch.setattr(fault_injector.os, "kill", lambda *given: sent.append(given))
    injector("sigterm", fault_injector_ranks="0,1").on_start(0)
    wait_for(lambda: sent)
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_other_ranks_and_ended_runs_are_left_alone() -> None:
    other = injector("crash", fault_injector_ranks="0")
    other.on_start(0)
    assert other._timer is None
    ended = injector("crash", delay=60.0, fault_injector_ranks="1")
    ended.on_start(0)
    ended.on_exit(1)
    assert ended._timer is not None
    ended._timer.join(5.0)
    assert not ended._timer.is_alive()
