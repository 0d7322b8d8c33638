"""Ranks of this host that end while they start are noticed."""

import os
import subprocess
import sys
from pathlib import Path

from megatron import siblings

SIBLING = "import sys; print(1, flush=True); sys.stdin.read()"


def test_a_rank_of_this_host_that_ends_in_the_start_is_named() -> None:
    """Processes of other runs do not count."""
    script = (
        "import os, sys, time\n"
        "from megatron.siblings import ended_siblings, notice_siblings\n"
        "notice_siblings(); time.sleep(0.5)\n"
        "print(ended_siblings(), flush=True)\n"
        "sys.stdin.readline()\n"
        "print(ended_siblings(), flush=True)\n"
    )
    run = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "WORLD_SIZE": "3",
        "MASTER_PORT": str(os.getpid()),
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def start(text: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", text], env={**run, **more}, **pipes)  # type: ignore[call-overload,no-any-return]

    others = [start(SIBLING, RANK="1"), start(SIBLING, RANK="2", MASTER_PORT="1"), start(SIBLING, RANK="0")]
    for other in others:
        assert other.stdout is not None and other.stdout.readline()
    mine = start(script, RANK="0")
    assert mine.stdout is not None
    assert mine.stdout.readline() == "[]\n"
    for other in others:
        other.communicate()
    assert mine.communicate("\n")[0] == "[1]\n"


def test_a_process_without_variables_of_a_launcher_has_no_siblings() -> None:
    """/proc has the variables with which a process was started."""
    assert siblings.siblings() == set() or "RANK" in os.environ
