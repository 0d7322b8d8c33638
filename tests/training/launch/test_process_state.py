"""What the system says about a process."""

import os
import signal
import time
from pathlib import Path
from unittest import mock

from megatron.training.launch.process_state import kill_if_stopped, machine_name, place_of_main_thread, process_state


def test_the_states_of_a_process() -> None:
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(10)
    assert process_state(child) == "running"
    kill_if_stopped(child)
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    assert process_state(child) == "stopped"
    kill_if_stopped(child)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert process_state(child) == "ended"


def test_the_place_of_the_main_thread() -> None:
    assert "test_the_place_of_the_main_thread (test_process_state.py:" in place_of_main_thread()
    with mock.patch("linecache.checkcache", side_effect=AssertionError("a file is read")):
        place_of_main_thread()


def test_machines_of_one_name_differ() -> None:
    with mock.patch("socket.gethostname", return_value="localhost"):
        here = machine_name()
        assert here == machine_name()
        with mock.patch.object(Path, "read_text", return_value="another boot"):
            assert machine_name() != here
