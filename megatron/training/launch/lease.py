"""The lease of a folder of checkpoints: two runs never write into one folder.

Rank 0 writes a small file into the folder of --save (and into that of temporary checkpoints) and renews it every few
seconds. A run that finds the file of another run ends before it trains. The file of a run that has ended is taken over:

- at once if its process was on this machine and is gone, or if it belongs to an earlier start of the same job;
- otherwise after it has not been renewed for `SILENCE` seconds. The reader measures this time by its own clock, since
  the clocks of two hosts and of a file server differ.

A run whose lease was taken over, because it could not renew it for so long, ends when it notices this.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.exceptions import UserError
from megatron.core.utils.store_path import StorePath, place
from megatron.launcher import start_time
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import Environment
from megatron.training.launch.errors import write_launcher_error_file
from megatron.training.launch.heartbeat import end_at_once
from megatron.training.launch.process_state import machine_name

FILE = "lease.json"
RENEWAL = 5.0
"""Seconds between two renewals."""
SILENCE = 60.0
"""Seconds without a renewal after which the lease of another machine is taken over."""
_TRIES = 10
_LENGTH = 1023
"""The file always has the same length, so one write replaces its content."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease, as the file describes it."""

    host: str
    machine: str
    """Equal for two processes that see each other's process ids."""
    pid: int
    began: int | None
    """When the process started (`start_time`)."""
    job: str | None
    """The job of a scheduler or launcher that starts a run again; None if none says so."""
    attempt: int
    """How often the job was started again."""
    token: str
    """Different in each lease."""
    since: float
    """Time of the host's clock at which the lease was taken."""

    @classmethod
    def of_this_process(cls) -> "Holder":
        """Describes this process, for a new lease."""
        job, attempt = _job()
        pid, token = os.getpid(), secrets.token_hex(8)
        return cls(socket.gethostname(), machine_name(), pid, start_time(pid), job, attempt, token, time.time())

    @property
    def name(self) -> str:
        """Host and process id, for messages."""
        return f"process {self.pid} on {self.host}"

    def is_gone(self, mine: "Holder") -> bool:
        """Whether the holder has surely ended: it was this process, or is no longer on this machine, or belongs to an
        earlier start of this job."""
        if self.machine == mine.machine:
            return self.pid == mine.pid or start_time(self.pid) != self.began or self.began is None
        return self.job is not None and self.job == mine.job and self.attempt < mine.attempt


def _job() -> tuple[str | None, int]:
    job, run = os.environ.get("SLURM_JOB_ID"), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job is not None:
        return f"slurm {job}", _count("SLURM_RESTART_COUNT")
    return (None, 0) if run == "none" else (f"torchrun {run}", _count("TORCHELASTIC_RESTART_COUNT"))


def _count(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


class Lease:
    """The lease of one folder. `take` it, then call `renew` now and then, and at the end `give_back`."""

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        self.folder, self.path, self._say = folder, folder / FILE, say
        self.mine = Holder.of_this_process()
        self._beat = 0

    def take(self) -> None:
        """Takes the lease. Raises UserError if another run holds it, OSError if the file cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                self._write(os.O_CREAT | os.O_EXCL)
                return
            content = self._read()
            if content is None:  # given back since
                continue
            holder = _holder(content)
            if holder is None or not holder.is_gone(self.mine):
                self._check_is_silent(content, holder)
            elif holder.pid != self.mine.pid:
                self._say(
                    f"{self.path}: {holder.name} did not give this lease back and is gone; this run takes it over"
                )
            if self._read() == content:  # no third run was faster
                self._write()
                return
        raise UserError(f"{self.path} changes all the time: several runs save into {self.folder}; end all but one")

    def renew(self) -> str | None:
        """Shows that this run lives. Returns a sentence if another process has taken the lease, else None. Raises
        OSError if the file cannot be read or written."""
        content = self._read()
        holder = None if content is None else _holder(content)
        if content is not None and holder is None:  # another process is writing it
            return None
        if holder is not None and holder.token != self.mine.token:
            return (
                f"{holder.name} has taken over {self.folder} (--save) from this run (process {self.mine.pid} on "
                f"{self.mine.host}), which had not renewed {self.path} in time; this run ends and saves nothing more"
            )
        self._beat += 1
        self._write(os.O_CREAT)  # the file may have been deleted
        return None

    def give_back(self) -> None:
        """Removes the file, unless another run has taken the lease."""
        with contextlib.suppress(OSError):
            holder = _holder(self._read() or b"")
            if holder is not None and holder.token == self.mine.token:
                self.path.unlink()

    def _check_is_silent(self, content: bytes, holder: Holder | None) -> None:
        """Watches the lease of a process that may live. Raises UserError if it does."""
        who = "another run" if holder is None else holder.name
        if holder is not None and holder.machine == self.mine.machine:
            raise self._refusal(holder, f"it lives, and has held {self.path} for {time.time() - holder.since:.0f} s")
        self._say(f"{self.path}: {who} holds this lease; this run watches for {SILENCE:g} s whether it is renewed")
        began = time.monotonic()
        while time.monotonic() - began < SILENCE:
            time.sleep(min(RENEWAL / 5, SILENCE / 5))
            now = self._read()
            if now is None:
                return
            if now != content:
                raise self._refusal(_holder(now), f"it renewed {self.path} less than {RENEWAL:g} s ago")
        self._say(f"{self.path}: {who} has not renewed it for {SILENCE:g} s; this run takes it over")

    def _refusal(self, holder: Holder | None, sign: str) -> UserError:
        who, where = ("another run", "") if holder is None else (holder.name, f" on {holder.host}")
        return UserError(
            f"{who} writes into {self.folder} (--save) already: {sign}; end it{where}, or give this run another --save"
        )

    def _read(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, how: int = 0) -> None:
        content = json.dumps({**asdict(self.mine), "beat": self._beat}).encode()
        descriptor = os.open(self.path, os.O_WRONLY | how, 0o644)
        try:
            os.pwrite(descriptor, content.ljust(_LENGTH) + b"\n", 0)  # a reader sees the old content or the new one
        finally:
            os.close(descriptor)


def _holder(content: bytes) -> Holder | None:
    """Returns the holder that the file describes; None if it describes none."""
    try:
        values: dict[str, Any] = json.loads(content)
        return Holder(**{field.name: values[field.name] for field in fields(Holder)})
    except (ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def leases_of_run(config: PretrainConfig, environment: Environment) -> Iterator[None]:
    """Holds the leases of the folders that the run saves into. Raises UserError, the same on all ranks, if another run
    holds one. If the run loses one, all ranks end with exit code 2. Collective."""
    if config.checkpoint.save is None:
        yield
        return
    folders = [place(config.checkpoint.save)]
    temporary = config.checkpoint.non_persistent_global_ckpt_dir  # without it, temporary checkpoints are under --save
    if config.checkpoint.non_persistent_save_interval is not None and temporary is not None:
        folders += [place(temporary)] if place(temporary).resolve() != folders[0].resolve() else []
    leases = [Lease(folder, _say) for folder in folders if not isinstance(folder, StorePath)]
    taken: list[Lease] = []
    over = threading.Event()

    def take() -> None:
        for lease in leases:
            try:
                lease.take()
                taken.append(lease)
            except OSError as error:
                _say(f"WARNING: {lease.path}: {error.strerror}; a second run that saves there would not be noticed")

    try:
        RankCoordinator().run_on_first(take)
        if taken:
            threading.Thread(target=_renew, args=(taken, over, environment), name="lease", daemon=True).start()
        yield
    finally:
        over.set()
        for lease in taken:
            lease.give_back()


def _renew(leases: Sequence[Lease], over: threading.Event, environment: Environment) -> None:
    while not over.wait(RENEWAL):
        for lease in leases:
            try:
                lost = lease.renew()
            except OSError:  # the disk may come back; if another run has taken the lease meanwhile, it is seen then
                continue
            if lost is not None and not over.is_set():
                _end(lost, environment)


def _end(lost: str, environment: Environment) -> None:
    """Ends the run at once: what it would save is of no use, and the other run has the folder."""
    os.write(2, f"error: {lost}\n".encode())
    write_launcher_error_file(lost)
    if environment.heartbeat is not None:
        environment.heartbeat.report(UserError(lost))
        time.sleep(1.0)  # until the other ranks have the order to end
    end_at_once(2)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
