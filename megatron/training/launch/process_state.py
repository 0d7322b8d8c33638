"""Asks the operating system whether processes of this machine are stopped, ended or running."""

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path


def machine_name() -> str:
    """Returns a text that two processes share only if they can see each other's process ids. Host names are
    not enough: several machines may have the same one."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return f"{socket.gethostname()} {os.getpid()}"


def process_state(pid: int) -> str | None:
    """Returns "stopped" (by SIGSTOP or a debugger), "ended" or "running"; None if the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "ended" if Path("/proc/self/stat").exists() else None
    except OSError:
        return None
    letter = text.rpartition(")")[2].split()[0]
    return {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}.get(letter, "running")


def kill_if_stopped(pid: int) -> None:
    """Ends a stopped process of this user by SIGKILL; other signals do not reach it."""
    if process_state(pid) == "stopped":
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def place_of_main_thread() -> str:
    """Returns where the main thread of this process is: the innermost calls, outermost first. Reads no source files,
    which may lie on the file system that hangs."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "unknown"
    calls: list[str] = []
    while frame is not None and len(calls) < 4:
        calls.append(f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return " > ".join(reversed(calls))
