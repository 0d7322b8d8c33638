"""A world of processes that lives through many calls: starting eight takes seconds, a call of them milliseconds."""

import contextlib
import faulthandler
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.processes import forkserver

_NO_MORE = b""
"""Instead of a call: there are none to come."""

_GRACE = 5.0
"""Seconds after which ranks that were told to end are ended."""


class Pool:
    """Processes in one world of torch.distributed, which wait for calls.

    Ranks 0 .. n-1 answer a call of n ranks; the others sleep. A rank that raises, dies or hangs fails the caller with
    what all ranks said (of a hang, with the place in which every rank stands), and the next call starts a new world,
    since the old one's ranks may be waiting for each other. `close` ends the processes; a `with` block does.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: str = "cpu",
        backend: str = "gloo",
        seconds: float = 100.0,
        context: Any = forkserver,
    ) -> None:
        """`context` of multiprocessing: how processes begin."""
        self.world_size, self.device, self.backend, self.seconds = world_size, device, backend, seconds
        self.context = context
        self.starts = 0
        """Worlds that were started."""
        self._processes: list[BaseProcess] = []
        self._ends: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        """function(*args) on ranks 0 .. ranks-1; what each returned, in rank order. The function is module-level."""
        assert ranks <= self.world_size
        if not self._processes:
            self._start()
        call = pickle.dumps((function, args))
        answers: dict[int, Any] = {}
        try:
            for end in self._ends[:ranks]:
                end.send_bytes(call)
            self._collect(answers, ranks)
        except BaseException:
            self.close(at_once=True)
            raise
        return [answers[rank] for rank in range(ranks)]

    def close(self, at_once: bool = False) -> None:
        """End the processes and wait until they are gone."""
        for end in self._ends:
            with contextlib.suppress(OSError):  # it ended by itself
                # A word, not the end of the pipe alone: of that forked ranks have copies.
                end.send_bytes(_NO_MORE)
            end.close()
        for process in self._processes:
            if not at_once:
                process.join(_GRACE)
            if process.is_alive():
                process.kill()
            process.join()
        self._processes, self._ends = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.starts += 1
        for rank in range(self.world_size):
            ours, theirs = self.context.Pipe()
            process = self.context.Process(
                target=_serve,
                args=(theirs, rank, self.world_size, self._folder.name, self.device, self.backend, self.seconds),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)

    def _collect(self, answers: dict[int, Any], ranks: int) -> None:
        waiting = {self._ends[rank]: rank for rank in range(ranks)}
        failures: dict[int, str] = {}
        while waiting:
            # Once one has failed, others may wait for it for ever; those that failed by themselves say so soon.
            ready = wait(list(waiting), timeout=1.0 if failures else self.seconds + _GRACE)
            if not ready and failures:
                break
            if not ready:
                failures = {rank: f"no answer\n{self._stack_of(rank)}" for rank in waiting.values()}
                break
            for end in ready:
                assert isinstance(end, Connection)
                rank = waiting.pop(end)
                try:
                    fine, answer = pickle.loads(end.recv_bytes())
                except EOFError:
                    fine, answer = False, "ended without an answer"
                (answers if fine else failures)[rank] = answer
        if failures:
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))

    def _stack_of(self, rank: int) -> str:
        assert self._folder is not None
        file = _stack_file(self._folder.name, rank)
        return file.read_text() if file.exists() else ""


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-of-{rank}"


def _serve(end: Connection, rank: int, world_size: int, folder: str, device: str, backend: str, seconds: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{os.path.join(folder, 'store')}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )
    with _stack_file(folder, rank).open("w") as stack:
        while (call := _next_call(end)) is not None:
            faulthandler.dump_traceback_later(seconds, file=stack)
            try:
                function, args = pickle.loads(call)
                answer = pickle.dumps((True, function(*args)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(BrokenPipeError):  # nobody waits any more: another rank failed
                end.send_bytes(answer)
    # The other ranks of the world may be gone already: there is nothing to take leave of.
    os._exit(0)


def _next_call(end: Connection) -> bytes | None:
    try:
        return end.recv_bytes() or None
    except EOFError:
        return None
