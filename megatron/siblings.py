"""Notices other ranks of this host that end while they start, before heartbeats watch them.

An entry script calls `notice_siblings` before its other imports. From then on a thread looks for processes that the
same launcher has started for other ranks. `ended_siblings` returns the ranks that were seen and are gone. A rank that
waits for others in the start calls it. A run whose heartbeats have begun does not.
"""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import ClassVar

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables with the rank of a process, as launchers set them; the first that is set counts."""

_RUN = (
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
"""Variables that are equal in all processes of a run."""

_LONGEST_PAUSE = 2.0
_MOST_SECONDS = 600.0


def notice_siblings() -> None:
    """Starts to look for other ranks. Does nothing without a launcher's variables, and in a second call."""
    if _Noticed.started:
        return
    _Noticed.started = True
    if any(name in os.environ for name in _RANKS):
        threading.Thread(target=_look, name="siblings", daemon=True).start()


def ended_siblings() -> list[int]:
    """Returns the ranks of this host that were seen since `notice_siblings` and have no process any more."""
    now = siblings()
    _Noticed.ranks |= now
    return sorted(_Noticed.ranks - now)


def stop_noticing() -> None:
    """Ends the thread: from now on heartbeats watch the ranks."""
    _Noticed.over.set()


def siblings() -> set[int]:
    """Returns the other ranks of this run that have a process on this host."""
    mine = _variables("self")
    if mine is None:
        return set()
    found = {
        other[0]
        for folder in Path("/proc").glob("[0-9]*")
        if (other := _variables(folder.name)) is not None and other[1] == mine[1]
    }
    return found - {mine[0]}


def _variables(process: str) -> tuple[int, tuple[bytes | None, ...]] | None:
    """Returns the rank of a process, and what it shares with those of its run; None if it is no rank. A process that
    has ended has no variables."""
    with contextlib.suppress(OSError, ValueError):
        words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        values = {name.decode(): value for name, _, value in (word.partition(b"=") for word in words) if name in _NAMES}
        rank = next((values[name] for name in _RANKS if name in values), None)
        if rank is not None:
            return int(rank), tuple(values.get(name) for name in _RUN)
    return None


_NAMES = frozenset(name.encode() for name in (*_RANKS, *_RUN))


class _Noticed:
    """What this process knows of other ranks."""

    started = False
    ranks: ClassVar[set[int]] = set()
    over = threading.Event()


def _look() -> None:
    pause, end = 0.0, time.monotonic() + _MOST_SECONDS
    while not _Noticed.over.wait(pause) and time.monotonic() < end:
        _Noticed.ranks |= siblings()
        pause = max(pause, 0.05)
        pause = min(2 * pause, _LONGEST_PAUSE)
