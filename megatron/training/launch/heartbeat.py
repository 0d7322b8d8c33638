"""Heartbeats: all ranks of a run end soon after one has failed, and one message says which rank failed, why, and which
ranks wait for it.

A thread of every rank keeps a connection to the first rank, whose `heartbeat_server` watches all ranks. Each second the
thread sends a sign of life with the phase of the run and a counter of collectives. It does so while the main thread is
busy too, so long work (building an index, a save, the compilation of a kernel) is no failure. Failures are:

- A connection closes: the process has ended.
- A rank sends no sign of life, and another process on its machine sees that it is stopped, or no process on its machine
  answers.
- No rank makes progress while some wait, for --hang-timeout-seconds.
- The main thread reports its own exception (`report`).

Nothing here waits for the device or for another rank, and a step is not slowed.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import active_children
from typing import Any

import torch.distributed as dist

from megatron.core.exceptions import UserError
from megatron.core.utils.activity import activity
from megatron.core.utils.gpu_memory import is_lack_of_gpu_memory
from megatron.core.utils.rendezvous import is_first_to_claim
from megatron.core.utils.url_keys import hide_keys
from megatron.core.utils.world_store import StartFailed, wait_for_value
from megatron.training.launch.errors import write_launcher_error_file
from megatron.training.launch.heartbeat_server import HeartbeatServer
from megatron.training.launch.process_state import kill_if_stopped, machine_name, place_of_main_thread, process_state
from megatron.training.launch.watch import COMMUNICATION, ERROR, SIGNAL, USER_ERROR, Cause, Limits, Message, end_text

_RANKS_PER_SECOND = 1000
"""Signs of life that the first rank reads per second from all ranks together: the more ranks, the fewer each sends.
Those at the beginning of a step, so that the end of a killed rank names the step, are as many again at most."""

_HEAD_START = 1.0
"""Seconds that the failed rank has to print its traceback before other ranks end, which a launcher notices."""

_LAST_SECONDS = 20.0
"""Seconds that a process has to end by itself after its own error."""


class Progress:
    """Phase and iteration of this process, for messages about a failure."""

    def __init__(self) -> None:
        self.phase = "start"
        self.iteration: int | None = None
        """Iterations done; None before training."""
        self._on_phase: Callable[[], object] | None = None
        self._on_step: Callable[[], object] | None = None

    def call_on(self, phase: Callable[[], object], step: Callable[[], object]) -> None:
        """Calls these functions whenever a phase or a training step begins from now on."""
        self._on_phase, self._on_step = phase, step

    def enter(self, phase: str, iteration: int | None = None) -> None:
        """Begins a phase, after this number of iterations if it is given."""
        self.phase = phase
        if iteration is not None:
            self.iteration = iteration
        if self._on_phase is not None:
            self._on_phase()

    def reach(self, iteration: int) -> None:
        """Notes the number of iterations done, when a step begins."""
        self.iteration = iteration
        if self._on_step is not None:
            self._on_step()

    def where(self) -> Message:
        """Returns phase and iteration."""
        return {"phase": self.phase, "iteration": self.iteration}


class Heartbeat:
    """The thread of one rank (see the module's text).

    Args:
        store: a store that all ranks reach; `rank` 0 writes its address there.
        host: address of the machine of rank 0.
        progress: read by the thread; the run writes it.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, host: str, progress: Progress, limits: Limits | None = None
    ) -> None:
        self.rank, self.size, self.progress = rank, size, progress
        self.limits = limits or Limits()
        self._before_end: list[Callable[[], object]] = []
        self.interval = max(min(1.0, self.limits.silence / 5), size / _RANKS_PER_SECOND)
        self.limits = self.limits.for_interval(self.interval)
        self.cause: Message | None = None
        """The order to end, once it came."""
        self._server: HeartbeatServer | None = None
        self._kind: str | None = None
        """Kind of this rank's own failure."""
        self._told, self._over, self._sending = threading.Event(), threading.Event(), threading.Lock()
        self._step_sent = 0.0
        self._first: Message = {"phase": "start", "iteration": None}
        activity.forget()
        _Generation.number += 1
        key = f"heartbeat {_Generation.number}"
        self._store, self._end_key = store, f"{key} end"
        if rank == 0:
            token = secrets.token_hex(8)
            self._server = HeartbeatServer(size, self.limits, token, self.interval, progress.where)
            self._server.start()
            address: dict[str, Any] = {"port": self._server.port, "token": token}
            address |= {"machine": machine_name(), "pid": os.getpid()}
            store.set(key, json.dumps(address))
        self._address = json.loads(wait_for_value(store, key, rank, size, store.timeout))  # type: ignore[attr-defined]
        self._socket = socket.create_connection((host, self._address["port"]), timeout=10.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = {"rank": rank, "machine": machine_name(), "pid": os.getpid(), "token": self._address["token"]}
        self._send({"type": "hello", **hello})
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        _Generation.current = self
        progress.call_on(phase=self._phase_began, step=self._step_began)

    # The main thread -------------------------------------------------------------------------------------------------

    def call_before_end(self, function: Callable[[], object]) -> None:
        """Calls a function before the thread ends the process, for instance to finish a save. It must not need other
        ranks."""
        self._before_end.append(function)

    def report(self, error: BaseException) -> None:
        """Tells the others of an exception that ends this process. A second call does nothing."""
        if self._kind is None and not self._over.is_set():
            self._kind = kind_of(error)
            text = str(error) if isinstance(error, UserError | StartFailed) else f"{type(error).__name__}: {error}"
            if isinstance(error, SystemExit):
                text = f"SystemExit({error.code}), after a signal" if self._kind == SIGNAL else "the script called exit"
            self._send(
                {"type": "failed", "kind": self._kind, "text": hide_keys(text.strip()[:2000]), **self.progress.where()}
            )

    def wait_for_cause(self) -> Message | None:
        """Call it after `report`. Waits until the ranks know why the run ends, and returns the cause. Returns None if
        they do not learn it in time, and after a user's mistake that other ranks may find too."""
        if self._kind == USER_ERROR and self.rank != 0:
            return None
        self._told.wait(25.0 if self._kind == COMMUNICATION else 5.0)
        return self.cause

    def is_consequence(self) -> bool:
        """Whether the error of this rank only follows from the failure of another one. If no other rank has failed,
        this error is the best known cause."""
        known = self.cause is not None and self.cause["rank"] not in (None, self.rank)
        return self._kind == COMMUNICATION and known

    def finish(self) -> None:
        """Waits until every rank has reached the end of its program. Ends the process if one fails meanwhile."""
        if self._kind is None:
            self._send({"type": "bye", **self.progress.where()})
            self._over.wait()
        self.close()

    def close(self) -> None:
        """Ends the thread, without the other ranks."""
        self._over.set()
        _Generation.current = None
        self._socket.close()
        if self._server is not None:
            self._server.stop()

    # The thread ------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        buffer, heard, sent = b"", time.monotonic(), 0.0
        ready = select.poll()  # unlike select.select, it takes file descriptors above 1023
        ready.register(self._socket, select.POLLIN)
        while not self._over.is_set():
            now = time.monotonic()
            if now - sent >= self.interval:
                sent = now
                self._send_beat()
            try:
                data = self._socket.recv(1 << 16) if ready.poll(500 * self.interval) else None
            except OSError:
                data = b""
            if self._over.is_set():
                return
            if data:
                heard = time.monotonic()
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            elif data == b"":
                self._end_without_first(
                    "ended in {}, without a word: it was killed (by a signal, or because the machine had no memory "
                    "left), it crashed, or its script left the run"
                )
                return
            elif time.monotonic() - heard > self.limits.silence:
                self._look_at_first(time.monotonic() - heard)

    def _look_at_first(self, seconds: float) -> None:
        """The first rank has been silent."""
        near = self._address["machine"] == machine_name()
        state = process_state(self._address["pid"]) if near else None
        if state == "stopped":
            self._end_without_first("was stopped by a signal (SIGSTOP or SIGTSTP) in {}")
        elif state != "running" and seconds > self.limits.unreachable:
            self._end_without_first(f"gave no sign of life for {seconds:.0f} s in {{}}")

    def _end_without_first(self, what: str) -> None:
        if self._kind == USER_ERROR:
            return
        phase, iteration = self._first["phase"], self._first["iteration"]
        cause = Cause(0, what.format(phase if iteration is None else f"{phase}, after iteration {iteration}"))
        text = end_text(cause, self.size, {self.rank: self._report()})
        kill = [self._address["machine"], self._address["pid"]]
        printer = self.rank if self._prints_the_end_of_first() else None
        self._end({"type": "end", "text": text, "rank": 0, "code": 1, "printer": printer, "kill": kill})

    def _prints_the_end_of_first(self) -> bool:
        """Rank 1 prints it or the first rank of another node, because rank 1 may be gone as well if it is on the node
        of rank 0. If both live, the one does that is first in the store, which outlives rank 0 if torchrun serves
        it."""
        elsewhere = self._first.get("elsewhere")
        if self.rank not in (1, elsewhere):
            return False
        return elsewhere in (None, 1) or is_first_to_claim(self._store, self._end_key, str(self.rank))

    def _obey(self, message: Message) -> None:
        kind = message["type"]
        if kind == "beat":
            self._first = {**self._first, **message}
        elif kind == "look":
            self._send({"type": "seen", "rank": message["rank"], "state": process_state(message["pid"])})
        elif kind == "report":
            self._send({"type": "report", **self._report()})
        elif kind == "bye":
            self._over.set()
        elif kind == "end":
            self._end(message)

    def _report(self) -> Message:
        waits = [
            [call.channel.name, call.channel.ranks, call.number, call.operation]
            for call in list(activity.waits.values())
        ]
        counts = [[channel.name, channel.ranks, channel.number] for channel in list(activity.channels.values())]
        return {"waits": waits, "counts": counts, "place": place_of_main_thread()}

    def _phase_began(self) -> None:
        self._send_beat()
        if self._server is not None:
            self._server.tell_phase(**self.progress.where())

    def _step_began(self) -> None:
        """A killed rank cannot say in which step it was, so it says so before, if steps are not too short."""
        now = time.monotonic()
        if now - self._step_sent >= self.size / _RANKS_PER_SECOND:
            self._step_sent = now
            self._phase_began()

    def _send_beat(self) -> None:
        waits = bool(activity.waits)
        self._send({"type": "beat", "total": activity.total, "waits": waits, **self.progress.where()})

    def _send(self, message: Message) -> None:
        with self._sending, contextlib.suppress(OSError):  # the first rank is gone, which the thread notices
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _end(self, order: Message) -> None:
        """Ends the process. If the main thread is about to end it, this thread leaves that to it for a while."""
        self.cause = order
        if self._kind == USER_ERROR:  # the main thread ends the process, after the first rank has printed the error
            self._told.set()
            return
        if order["text"]:
            write_launcher_error_file(order["text"])
        if order["printer"] == self.rank:
            os.write(2, f"{order['text']}\n".encode())
        if order["kill"] is not None and order["kill"][0] == machine_name() and order["rank"] != self.rank:
            _kill(order["kill"][1], first=order["printer"] == self.rank)
        self._told.set()
        if self._kind is not None:
            time.sleep(_LAST_SECONDS)
        else:
            time.sleep(_HEAD_START)
            for function in self._before_end:
                with contextlib.suppress(Exception):  # the failure that brought us here is the one to show
                    function()
        end_at_once(order["code"])


def _kill(pid: int, first: bool) -> None:
    """Ends a stopped process. Only the `first` rank does so at once; the others wait, so that every rank has the time
    to see that the process is stopped."""
    end = time.monotonic() + (0.0 if first else 5.0)
    while process_state(pid) == "stopped" and time.monotonic() < end:
        time.sleep(0.1)
    kill_if_stopped(pid)


def kind_of(error: BaseException) -> str:
    """Returns the kind of a failure: a user's mistake, a signal, a communication that another rank did not finish, or
    another error."""
    if isinstance(error, UserError):
        return USER_ERROR
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return SIGNAL
    if isinstance(error, RuntimeError) and not is_lack_of_gpu_memory(error):
        link: BaseException | None = error
        while link is not None:
            if isinstance(link, dist.DistError) or _raised_by_communication(link):
                return COMMUNICATION
            link = link.__cause__ or link.__context__
    return ERROR


def _raised_by_communication(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename.replace(os.sep, "/") if frames else ""
    return "/torch/distributed/" in last or last.endswith("megatron/core/communication/collectives.py")


def end_at_once(code: int) -> None:
    """Ends this process and those that load its data, from any thread, while the main thread waits or computes."""
    timer = threading.Timer(2.0, os._exit, (code,))  # a stream whose reader has stopped cannot be flushed
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread in the exit functions of the main thread
        timer.start()
    for child in active_children():
        with contextlib.suppress(OSError):
            os.kill(child.pid or 0, signal.SIGKILL)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class _Generation:
    """The heartbeats of this process, one after the other."""

    number = 0
    current: Heartbeat | None = None


def _after_fork() -> None:
    """Closes the copies of the connection in a forked child, which would keep it open after this process has ended."""
    heartbeat, _Generation.current = _Generation.current, None
    if heartbeat is not None:
        heartbeat._socket.close()
        if heartbeat._server is not None:
            heartbeat._server.close()
        # The child has no such thread. If it ends as a program does, it must not wait for one.
        heartbeat._sending, heartbeat._over = threading.Lock(), threading.Event()
        heartbeat._over.set()


os.register_at_fork(after_in_child=_after_fork)
