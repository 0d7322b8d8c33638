"""Signals before and during training, in real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.training.launch.signals import SignalWatch

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


SETUP = """
import sys, time, threading
from megatron.training.launch.signals import SignalWatch
from megatron.core.utils.files import open_atomically
with SignalWatch(grace=0.5):
    with open_atomically(sys.argv[1]) as file:
        file.write(b"half")
        print("ready", flush=True)
        {stuck}
"""


def run_setup(tmp_path, stuck):
    process = subprocess.Popen(
        [sys.executable, "-c", SETUP.format(stuck=stuck), str(tmp_path / "index.npy")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(1.0)  # from there into the call that follows
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


def test_before_training_a_signal_is_obeyed_at_once_and_leaves_nothing_half(tmp_path):
    code, errors = run_setup(tmp_path, "time.sleep(60)")
    assert code == 128 + signal.SIGTERM
    assert errors == "SIGTERM before training: exiting\n"
    assert list(tmp_path.iterdir()) == []


def test_before_training_even_a_stuck_program_ends(tmp_path):
    # Python's handler cannot run while the main thread is inside one C call.
    started = time.monotonic()
    code, errors = run_setup(tmp_path, "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)")
    assert code == 128 + signal.SIGTERM
    assert "the signal was not obeyed in time" in errors
    assert time.monotonic() - started < 20.0, "the call itself would take minutes"


def test_a_second_interrupt_means_now_but_not_at_once():
    watch = SignalWatch()
    with watch, watch.training():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a launcher repeats what the terminal sent
        assert watch.received == signal.SIGINT
        watch._received_at -= 2.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)]
    with SignalWatch() as watch, watch.training():
        assert signal.getsignal(signal.SIGTERM) == watch._handle
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)] == before
    assert signal.set_wakeup_fd(-1) == -1


WORKER = """
import os, signal, sys, time
from megatron.training.launch.signals import SignalWatch, shield_worker
with SignalWatch() as watch, watch.training():
    child = os.fork()
    if child == 0:
        if sys.argv[1] == "shielded":
            shield_worker()
        print("ready", flush=True)
        time.sleep(0.5 if sys.argv[1] == "shielded" else 60.0)
        time.sleep(0.5 if sys.argv[1] == "shielded" else 60.0)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    print(watch.received, os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.parametrize(("kind", "code"), [("shielded", 7), ("bare", -signal.SIGTERM)])
def test_a_signal_to_the_whole_group_spares_shielded_workers(kind, code):
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, kind],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert output == f"{int(signal.SIGTERM)} {code}\n"
