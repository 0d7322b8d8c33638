"""A pool of processes that are the ranks of one torch.distributed world and answer many calls."""

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.forkserver import forkserver, start_server

_NO_MORE = b""
"""Sent instead of a call: the rank ends."""

_START_SECONDS = 300.0
"""Time that ranks have to start. The machine may be busy with other work."""

_NUMPY = frozenset({torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool})

_GRACE = 10.0
"""Time that ranks have to end after they were told to, and a rank that hangs to write where it is."""


class Pool:
    """Processes in one world of torch.distributed that wait for calls.

    Ranks 0 .. n-1 answer a call of n ranks; the others sleep. A call fails if any rank raises, dies or does not answer
    in time. The error has a text for every rank that failed; for a rank that hangs it is the rank's stack. The next
    call then starts new processes. `close` (or the end of a `with` block) ends the processes.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: str = "cpu",
        backend: str = "gloo",
        seconds: float = 240.0,
        patience: float = 15.0,
        context: Any = forkserver,
    ) -> None:
        """`seconds`: time limit of a call. `patience`: time that other ranks have to answer after one has failed.
        `context`: multiprocessing context that starts the processes."""
        self.world_size, self.device, self.backend = world_size, device, backend
        self.seconds, self.patience, self.context = seconds, patience, context
        self.starts = 0
        """Number of worlds that were started."""
        self._processes: list[BaseProcess] = []
        self._ends: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        """Calls function(*args) on ranks 0 .. ranks-1 and returns the results in rank order.

        The function is a module-level one. Raises AssertionError with the texts of all ranks that failed.
        """
        assert ranks <= self.world_size
        try:
            if not self._processes:
                self._start()
            call = pickle.dumps((function, args))
            for end in self._ends[:ranks]:
                end.send_bytes(call)
            return self._collect(ranks, self.seconds)
        except BaseException:
            self.close(at_once=True)
            raise

    def close(self, at_once: bool = False) -> None:
        """Ends the processes and waits until they are gone. `at_once`: kills them."""
        for end in self._ends:
            with contextlib.suppress(OSError):  # the process ended by itself
                # Closing the pipe is not enough: forked ranks hold copies of its end.
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
        if self.context is forkserver:
            start_server()
        self._folder = tempfile.TemporaryDirectory()
        self.starts += 1
        for rank in range(self.world_size):
            ours, theirs = self.context.Pipe()
            process = self.context.Process(
                target=_serve,
                args=(theirs, rank, self.world_size, self._folder.name, self.device, self.backend, self.seconds),
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)
        self._collect(self.world_size, _START_SECONDS)

    def _collect(self, ranks: int, seconds: float) -> list[Any]:
        """The answers of ranks 0 .. ranks-1, in rank order.

        After a failure the other ranks have time to answer as well: the error then does not depend on which rank is
        first. Ranks that failed stay alive meanwhile, since a rank that loses its connections reports that instead.
        """
        waiting = {self._ends[rank]: rank for rank in range(ranks)}
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting:
            ready = wait(list(waiting), timeout=self.patience if failures else seconds + 1.0)
            if not ready:
                if not failures:
                    failures = {rank: f"no answer\n{self._stack_of(rank)}" for rank in waiting.values()}
                break
            for end in ready:
                assert isinstance(end, Connection)
                rank = waiting.pop(end)
                try:
                    fine, answer = pickle.loads(end.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(_GRACE)
                    fine, answer = False, f"ended without an answer, exit code {self._processes[rank].exitcode}"
                (answers if fine else failures)[rank] = answer
        if failures:
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [answers[rank] for rank in range(ranks)]

    def _stack_of(self, rank: int) -> str:
        """The stack that a rank wrote when its time was over."""
        assert self._folder is not None
        file = _stack_file(self._folder.name, rank)
        end = time.monotonic() + _GRACE
        while not (text := file.read_text() if file.exists() else "") and time.monotonic() < end:
            time.sleep(0.1)
        return text


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-of-{rank}"


_GARBAGE = 50_000
"""Objects between two garbage collections within a call: most calls have none, since one follows each call."""


def _serve(end: Connection, rank: int, world_size: int, folder: str, device: str, backend: str, seconds: float) -> None:
    """Answers calls until the pool says that there are no more."""
    gc.set_threshold(_GARBAGE)
    with _stack_file(folder, rank).open("w") as stack:
        end.send_bytes(_answer(_join_world, rank, world_size, folder, device, backend, seconds))
        while (call := _next_call(end)) is not None:
            faulthandler.dump_traceback_later(seconds, file=stack)
            answer = _answer(_called, call)
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(BrokenPipeError):  # the pool was closed because another rank failed
                end.send_bytes(answer)
            # Process groups in reference cycles keep threads, which wake up a hundred times a second.
            gc.collect()
    for child in multiprocessing.active_children():
        child.terminate()
    # Without torch's farewell to the other ranks: these may have ended already.
    os._exit(0)


def _called(call: bytes) -> Any:
    function, args = pickle.loads(call)
    return function(*args)


def _answer(function: Callable[..., Any], *args: Any) -> bytes:
    """Pickled (True, result), or (False, text of the exception)."""
    try:
        file = io.BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump((True, function(*args)))
        return file.getvalue()
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


class _Pickler(pickle.Pickler):
    """Writes plain tensors as numpy's arrays, ten times as fast as torch does. Views become tensors of their own."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.device.type != "cpu" or obj.requires_grad or obj.dtype not in _NUMPY:
            return NotImplemented
        return torch.from_numpy, (np.array(obj.numpy(), order="C"),)


def _join_world(rank: int, world_size: int, folder: str, device: str, backend: str, seconds: float) -> None:
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # the system's default, not that of this process
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        init_method=f"file://{os.path.join(folder, 'store')}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=max(seconds, _START_SECONDS)),
    )


def _next_call(end: Connection) -> bytes | None:
    try:
        return end.recv_bytes() or None
    except EOFError:
        return None
