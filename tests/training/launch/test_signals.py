"""Signals before and during training, in real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.programs import python

from megatron.training.launch import signals
from megatron.training.launch.signals import SignalWatch

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


SETUP = """
import sys, threading, time
from megatron.core.utils.files import open_atomically
from megatron.training.launch.signals import SignalWatch
sys.setswitchinterval(1000)  # the other thread runs only when this one has entered the call
entering = threading.Event()
threading.Thread(target=lambda: (entering.wait(), print("ready", flush=True)), daemon=True).start()
with SignalWatch(grace={grace}):
    with open_atomically(sys.argv[1]) as file:
        file.write(b"half")
        entering.set()
        {stuck}
"""


def run_setup(tmp_path, stuck, grace):
    process = subprocess.Popen(
        [python(), "-c", SETUP.format(stuck=stuck, grace=grace), str(tmp_path / "index.npy")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors


def test_before_training_a_signal_is_obeyed_at_once_and_leaves_nothing_half(tmp_path):
    code, errors = run_setup(tmp_path, "while True: time.sleep(0.01)", grace=300)
    assert code == 128 + signal.SIGTERM
    assert errors == "SIGTERM before training: exiting\n"
    assert list(tmp_path.iterdir()) == []


def test_before_training_even_a_stuck_program_ends(tmp_path):
    # Python's handler cannot run while the main thread is inside one C call, which would take minutes.
    code, errors = run_setup(tmp_path, "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2 * 10**9)", grace=0.5)
    assert code == 128 + signal.SIGTERM
    assert "no reaction 0.5 seconds after the signal: ending the process" in errors


def test_a_second_interrupt_means_now_but_not_at_once(monkeypatch):
    monkeypatch.setattr(signals, "SECOND_PRESS_AFTER", 1000.0)
    watch = SignalWatch()
    with watch, watch.training():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a launcher repeats what the terminal sent
        assert watch.received == signal.SIGINT
        watch._received_at -= 2000.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)


def test_a_signal_while_an_error_ends_the_program_cuts_nothing_short(capsys):
    """torchrun sends SIGTERM when a rank was killed, while the others wait to learn which one failed."""
    with SignalWatch() as watch:
        with pytest.raises(ValueError), watch.training():
            raise ValueError
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.received == signal.SIGTERM and capsys.readouterr().err == ""
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)
        assert capsys.readouterr().err == "SIGINT while an error ends the run: exiting\n"
    with SignalWatch():
        signals.leave_error_alone()  # of an error before training
        os.kill(os.getpid(), signal.SIGTERM)
    signals.leave_error_alone()  # without a watch


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)]
    with SignalWatch() as watch, watch.training():
        assert signal.getsignal(signal.SIGTERM) == watch._handle
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)] == before
    assert signal.set_wakeup_fd(-1) == -1


WORKER = """
import os, signal, sys
from megatron.training.launch.signals import SignalWatch, shield_worker
with SignalWatch() as watch, watch.training():
    child = os.fork()
    if child == 0:
        if sys.argv[1] == "shielded":
            shield_worker()
        print("ready", flush=True)
        sys.stdin.read()
        os._exit(8 if signal.alarm(0) else 7)  # no alarm ends it: the step or the save before the end may take minutes
    _, status = os.waitpid(child, 0)
    print(watch.received, os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.parametrize(("kind", "code"), [("shielded", 7), ("bare", -signal.SIGTERM)])
def test_a_signal_to_the_whole_group_spares_shielded_workers(kind, code):
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=240)  # closes the worker's standard input
    assert output == f"{int(signal.SIGTERM)} {code}\n"
