"""A rank ends with its launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.launcher import start_time

ROOT = Path(__file__).parents[1]

RANK = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from megatron.launcher import end_with_launcher
end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(30)
"""

LAUNCHER = """
import json, os, subprocess, sys
words = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-IS", "-c", sys.argv[1]]  # a shell in between lives on
subprocess.run(words if sys.argv[2] else words[4:], env={**os.environ, "RANK": "0", **json.loads(sys.argv[3])})
"""


@pytest.mark.slow_cases("mark1-False-in a shell")  # it takes the time that a rank would take to end
@pytest.mark.parametrize("wrapped", ["", "in a shell"])
@pytest.mark.parametrize(("mark", "ends"), [({"TORCHELASTIC_RUN_ID": "none"}, True), ({}, False)])
def test_a_rank_ends_soon_after_its_launcher_is_killed(wrapped: str, mark: dict[str, str], ends: bool) -> None:
    """Without a variable of torchrun, the parent is the shell of a user, which may end."""
    words = [sys.executable, "-IS", "-c", LAUNCHER, RANK, wrapped, json.dumps(mark)]
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stderr is not None
    rank = int(launcher.stdout.readline())
    began = start_time(rank)
    assert began is not None
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + (20.0 if ends else 1.5)
    while start_time(rank) == began and time.monotonic() < end:
        time.sleep(0.05)
    if ends:
        assert start_time(rank) != began
        assert launcher.stderr.read() == f"the run ends: the launcher of rank 0 (process {launcher.pid}) is gone\n"
    else:
        assert start_time(rank) == began
        os.kill(rank, signal.SIGKILL)
    launcher.stdout.close()
    launcher.stderr.close()


def test_a_process_that_has_ended_has_no_start_time() -> None:
    mine = start_time(os.getpid())
    child = subprocess.Popen([sys.executable, "-IS", "-c", ""])
    assert mine is not None and (start_time(child.pid) or mine) >= mine
    while start_time(child.pid) is not None:  # a zombie, which nobody has waited for
        time.sleep(0.01)
    child.wait()
