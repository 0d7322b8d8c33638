"""Leaving early: real processes, real signals."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.programs import python

from megatron.training.hooks.exit import ExitAgreement, ExitReason

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class FakeWatch:
    received = None


def test_interval():
    agreement = ExitAgreement(None, exit_interval=3)
    assert [agreement.after_step(iteration) for iteration in (1, 2)] == [None, None]
    decision = agreement.after_step(3)
    assert (decision.reason, decision.exit_code, decision.save) == (ExitReason.INTERVAL, 0, True)
    assert decision.message == "exiting program at iteration 3"
    agreement.close()


def test_duration():
    agreement = ExitAgreement(None, exit_duration_in_mins=10, started=time.monotonic() - 599)
    assert agreement.after_step(1) is None
    agreement.started -= 2
    decision = agreement.after_step(2)
    assert (decision.reason, decision.exit_code, decision.save) == (ExitReason.DURATION, 0, True)
    assert decision.message == "exiting program after 10 minutes"


def test_signal_and_what_is_decided_stays():
    watch = FakeWatch()
    agreement = ExitAgreement(None, signals=watch, exit_interval=5)
    assert agreement.after_step(1) is None
    watch.received = signal.SIGTERM
    decision = agreement.poll()  # in the middle of an evaluation
    assert (decision.reason, decision.exit_code, decision.save) == (ExitReason.SIGNAL, 0, True)
    assert decision.message == "exiting program after receiving SIGTERM on rank 0"
    assert agreement.after_step(5) is decision


def test_a_non_finite_loss_ends_the_run_unsaved():
    decision = ExitAgreement(None, non_finite=lambda: True).after_step(1)
    assert (decision.reason, decision.exit_code, decision.save) == (ExitReason.NON_FINITE, 1, False)


def test_a_hook_asks_for_the_end():
    agreement = ExitAgreement(None)
    assert agreement.after_step(1) is None
    agreement.ask()
    decision = agreement.after_step(2)
    assert (decision.reason, decision.exit_code, decision.save) == (ExitReason.ASKED, 0, True)


LOOP = """
import signal, sys, time, torch, torch.distributed as dist
from megatron.training.hooks.exit import ExitAgreement, agreement_group
from megatron.training.launch.signals import SignalWatch
rank, world, folder, source = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, whose processes ignore it
with SignalWatch() as watch:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    trouble = lambda: source == "nan" and rank == 1 and iteration >= 5
    minutes = 1e-3 if source == "time" and rank == 1 else 1e9
    iteration = 0
    agreement = ExitAgreement(
        agreement_group(), rank=rank, signals=watch, exit_duration_in_mins=minutes, non_finite=trouble
    )
    decision = None
    with watch.training():
        while decision is None:
            time.sleep(0.002 * (1 + rank))  # ranks differ in speed
            iteration += 1
            if iteration == 3:
                print("training", flush=True)
            decision = agreement.after_step(iteration)
            if source == "evaluation" and iteration == 5:
                print("evaluating", flush=True)
                for _ in range(40_000):
                    time.sleep(0.005)
                    decision = agreement.poll()
                    if decision is not None:
                        break
                else:
                    sys.exit("the signal was not seen in the evaluation")
    agreement.close()
    print(iteration, decision.message, decision.save, agreement.rounds, sep=";", flush=True)
    dist.destroy_process_group()
sys.exit(decision.exit_code)
"""


def start(tmp_path, world, source):
    return [
        subprocess.Popen(
            [python(), "-c", LOOP, str(rank), str(world), str(tmp_path), source],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for rank in range(world)
    ]


def finish(processes):
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:  # a rank that missed the signal would run for ever
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode in (0, 1), errors
    return [output.strip().splitlines()[-1] for output, _ in outputs], outputs


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name
)
def test_a_signal_on_one_rank_stops_all_after_the_same_step(tmp_path, number):
    processes = start(tmp_path, 3, "signal")
    for process in processes:
        assert process.stdout.readline() == "training\n"
    processes[1].send_signal(number)
    last, outputs = finish(processes)
    assert len(set(last)) == 1
    iteration, message, save, rounds = last[0].split(";")
    assert int(iteration) >= 3
    assert int(rounds) == int(iteration) - 1  # one a step, none after the decision
    assert (message, save) == (f"exiting program after receiving {number.name} on rank 1", "True")
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert f"{number.name}: stopping after this step" in outputs[1][1]


def test_a_signal_during_evaluation_is_seen_there(tmp_path):
    processes = start(tmp_path, 2, "evaluation")
    for process in processes:
        while process.stdout.readline() != "evaluating\n":
            pass
    processes[0].send_signal(signal.SIGTERM)
    last, _ = finish(processes)
    assert len(set(last)) == 1
    assert last[0].startswith("5;exiting program after receiving SIGTERM on rank 0;True;")


@pytest.mark.parametrize(
    ("source", "message", "code"), [("time", "exiting program after", 0), ("nan", "non-finite", 1)]
)
def test_what_one_rank_notices_all_do(tmp_path, source, message, code):
    processes = start(tmp_path, 2, source)
    last, _ = finish(processes)
    assert last[0].split(";")[0] == last[1].split(";")[0]
    assert message in last[0] or message in last[1]
    assert [process.returncode for process in processes] == [code, code]


def test_a_rank_that_is_gone_is_noticed_within_a_step(tmp_path):
    processes = start(tmp_path, 2, "signal")
    for process in processes:
        assert process.stdout.readline() == "training\n"
    processes[1].kill()
    _, errors = processes[0].communicate(timeout=240)
    processes[1].communicate()
    assert processes[0].returncode == 1
    assert "rank 0: another rank is gone" in errors
