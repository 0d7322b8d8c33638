"""Ends a rank whose launcher is gone.

torchrun and mpirun end their ranks when they end, but not when they are killed by SIGKILL. The ranks would train on,
and write into the folder of a run that is started again. An entry script calls `end_with_launcher` before its other
imports. A process without such a launcher, as under `nohup`, is left alone.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LAUNCH_TOOL = "MEGATRON_LAUNCH_TOOL"
"""Environment variable of the processes that `tools/launch.py` starts: its process id, a dash and its start time."""

_MARKS = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables that a launcher sets for its ranks, and does not have itself."""

_INTERVAL = 1.0


def end_with_launcher() -> None:
    """Starts a thread that ends this process with code 1 soon after its launcher has ended. Does nothing without a
    launcher, on a system without /proc, and in a second call."""
    mark = next((name for name in _MARKS if name in os.environ), None)
    if _Watcher.started or mark is None:
        return
    _Watcher.started = True
    launchers = [(pid, began) for pid in launchers_of_this_process(mark) if (began := start_time(pid)) is not None]
    if launchers:
        threading.Thread(target=_watch, args=(launchers,), name="launcher-watch", daemon=True).start()


def launchers_of_this_process(mark: str) -> Iterator[int]:
    """Yields the nearest ancestor that does not have the variable `mark`, and the `tools/launch.py` above it."""
    tool = os.environ.get(LAUNCH_TOOL, "").partition("-")[0]
    pid: int | None = os.getppid()
    found = False
    while pid:
        if not found and not _has_variable(pid, mark):
            found = True
            yield pid
        if found and (not tool or str(pid) == tool):
            if str(pid) == tool:
                yield pid
            return
        pid = parent_of(pid)


def start_time(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since its machine did; None if it has ended, or without /proc. A
    process id that is used again has another start time."""
    fields = _fields(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def parent_of(pid: int) -> int | None:
    """Returns the process id of a process's parent; None if the process has ended."""
    fields = _fields(pid)
    return int(fields[1]) if fields else None


def _fields(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _has_variable(pid: int, name: str) -> bool:
    """Whether a process was started with an environment variable. That of another user's process cannot be read."""
    with contextlib.suppress(OSError):
        return any(
            word.startswith(f"{name}=".encode()) for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
    return False


class _Watcher:
    """Whether this process watches its launcher."""

    started = False


def _watch(launchers: list[tuple[int, int]]) -> None:
    while True:
        for pid, began in launchers:
            if start_time(pid) != began:
                _end(pid)
        time.sleep(_INTERVAL)


def _end(launcher: int) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        rank = os.environ.get("RANK", "0")
        os.write(2, f"the run ends: the launcher of rank {rank} (process {launcher}) is gone\n".encode())
    if "multiprocessing" in sys.modules:  # processes that read its data
        for child in sys.modules["multiprocessing"].active_children():
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGKILL)
    os._exit(1)
