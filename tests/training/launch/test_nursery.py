"""A process that starts ranks by forking: their variables, their exit codes, and their end when it ends."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.launcher import start_time
from megatron.training.launch import nursery

ROOT = Path(__file__).parents[3]
SLEEP, FAIL = "import time; time.sleep(600)", "raise SystemExit(7)"
SCRIPT = """
import os, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    file.write(" ".join([__name__, *(os.environ[name] for name in names), *sys.argv[2:]]))
if sys.argv[2] == "waits":
    time.sleep(600)
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "1" else 0)
"""


class Nursery:
    """The process, and this end of its channel."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        code = "from megatron.training.launch import nursery; nursery._IMPORTED = (); nursery.main()"
        command = [sys.executable, "-c", code, str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.lines = self.channel.makefile("r", encoding="utf-8")

    def ask(self, folder: Path, *words: str) -> list[int]:
        script = folder / "script.py"
        script.write_text(SCRIPT)
        request = {"script": str(script), "arguments": [str(folder), *words], "ranks": 2, "port": 1234}
        self.channel.sendall(json.dumps(request).encode() + b"\n")
        pids: list[int] = json.loads(self.lines.readline())["pids"]
        return pids

    def code(self) -> int:
        code: int = json.loads(self.lines.readline())["code"]
        return code


@pytest.fixture
def started() -> Iterator[Nursery]:
    process = Nursery()
    yield process
    process.lines.close()
    process.channel.close()
    assert process.process.wait(60) == 0


def wait_for(path: Path) -> None:
    while not path.exists() or not path.stat().st_size:
        time.sleep(0.01)


def test_ranks_start_again_and_again(started: Nursery, tmp_path: Path) -> None:
    for code in ("0", "3", "0"):
        pids = started.ask(tmp_path, code, "more")
        assert started.code() == int(code) and len({*pids, started.process.pid}) == 3
        for rank in (0, 1):
            assert (tmp_path / str(rank)).read_text() == f"__main__ {rank} {rank} 2 2 127.0.0.1 1234 {code} more"


def test_ranks_end_with_the_channel(started: Nursery, tmp_path: Path) -> None:
    pids = started.ask(tmp_path, "waits")
    wait_for(tmp_path / "1")
    started.channel.shutdown(socket.SHUT_RDWR)
    assert started.process.wait(60) == 0 and all(start_time(pid) is None for pid in pids)


def test_a_killed_rank_gives_the_others_a_while(
    started: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = started.ask(tmp_path, "waits")
    wait_for(tmp_path / "1")
    os.kill(pids[0], 9)
    os.kill(pids[1], 15)
    assert started.code() in (128 + 9, 128 + 15)


def test_the_first_failure_is_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not end by itself is killed after a while."""
    monkeypatch.setattr(nursery, "PATIENCE", 0.1)
    ours, theirs = socket.socketpair()
    waits, fails = (subprocess.Popen([sys.executable, "-IS", "-c", code]) for code in (SLEEP, FAIL))
    with ours, theirs:
        assert nursery._wait(theirs, [waits.pid, fails.pid]) == 7
    assert start_time(waits.pid) is None
