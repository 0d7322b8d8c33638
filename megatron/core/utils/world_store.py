"""The store through which the ranks of a run find each other, and the wait until all of them are there.

torch waits for other ranks inside C++, where no signal interrupts it: without limit for a server that does not answer,
and without a word about who is missing. Here a thread waits for torch, and the main thread waits for it in Python.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from megatron.siblings import ended_siblings

T = TypeVar("T")

ANSWER_SECONDS = 20.0
"""Time in which a store answers that can be reached; a program that takes longer is no store."""
NOTICE_SECONDS = 30.0
"""Time between two lines about what a rank waits for."""
_DEFAULT_TIMEOUT = timedelta(minutes=10)
_NAMED_RANKS = 8


class StartFailed(RuntimeError):
    """The ranks of a run have not found each other. The text says what to do; the command line may be right."""


def connect_to_store(rank: int, size: int, timeout: timedelta | None = None) -> dist.Store:
    """Returns the store at MASTER_ADDR and MASTER_PORT, which torchrun serves, or else rank 0. Raises StartFailed if it
    cannot be served or reached."""
    timeout = timeout or _DEFAULT_TIMEOUT
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not of_torchrun

    def connect() -> dist.Store:
        return dist.TCPStore(host, port, size, serves, timeout, wait_for_workers=False, multi_tenant=True)

    where = f"MASTER_ADDR {host}, MASTER_PORT {port}"
    try:
        store = _in_thread(connect, _Address(rank, size, host, port, serves).look)
    except dist.DistError as error:
        if serves:
            reason = "another program uses this port" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
            raise StartFailed(
                f"{where}: rank 0 cannot serve the store of the run: {reason}; give another port"
            ) from None
        raise StartFailed(
            f"{where}: rank {rank} has not reached the store of the run, which {_server(of_torchrun)} serves: "
            f"{str(error).splitlines()[0]}"
        ) from None
    if of_torchrun:
        return dist.PrefixStore(f"/worker/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store


def wait_for_ranks(store: dist.Store, rank: int, size: int, timeout: timedelta | None = None) -> None:
    """Waits until all ranks have called this function. Rank 0 raises StartFailed, which names the missing ones, after
    `timeout`."""
    end = time.monotonic() + (timeout or _DEFAULT_TIMEOUT).total_seconds()
    notice, pause, siblings = time.monotonic() + NOTICE_SECONDS, 0.002, _Siblings(rank, size)
    longest = 0.5 + size / 2000  # the more ranks, the fewer questions of each
    store.set(f"joined {rank}", "")
    missing = list(range(size)) if rank == 0 else []
    while True:
        missing = [other for other in missing if not store.check([f"joined {other}"])] if rank == 0 else []
        if rank == 0 and not missing:
            store.set("all joined", "")
            return
        if rank != 0 and store.check(["all joined"]):
            return
        if rank == 0:  # of the others, heartbeats hear
            siblings.check()
        now = time.monotonic()
        if rank == 0 and now > end:
            seconds = (timeout or _DEFAULT_TIMEOUT).total_seconds()
            raise StartFailed(
                f"{_named(missing)} of {size} did not start within {seconds:.0f} s (--distributed-timeout-minutes); "
                "look into their logs: they were not started, or ended while they imported modules"
            )
        if rank == 0 and now > notice:
            notice = now + NOTICE_SECONDS
            print(f"rank 0 waits for {_named(missing)} of {size} to start", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, longest)


def wait_for_value(store: dist.Store, key: str, rank: int, size: int, timeout: timedelta | None = None) -> bytes:
    """Returns the value of a key once a rank has set it. Raises StartFailed after `timeout`."""
    end, pause = time.monotonic() + (timeout or _DEFAULT_TIMEOUT).total_seconds(), 0.002
    siblings = _Siblings(rank, size)
    while not store.check([key]):
        siblings.check()
        if time.monotonic() > end:
            raise StartFailed("rank 0 did not start its heartbeat in time (--distributed-timeout-minutes)")
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    return store.get(key)


def _in_thread(function: Callable[[], T], look: Callable[[float], object]) -> T:
    """Returns the result of a function that does not return to Python while it waits. Meanwhile it calls `look` with
    the seconds so far; an error that `look` raises ends the wait, not the function."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="store", daemon=True)
    thread.start()
    began = time.monotonic()
    thread.join(1.0)
    while thread.is_alive():
        look(time.monotonic() - began)
        thread.join(1.0)
    if errors:
        raise errors[0]
    return results[0]


class _Siblings:
    """Looks now and then, while `rank` waits, whether another rank of this host has ended."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._next = time.monotonic() + 1.0

    def check(self) -> None:
        """Raises StartFailed if another rank of this host has ended."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1.0
        ended = ended_siblings()
        if ended:
            raise StartFailed(
                f"{_named(ended)} of {self._size} ended in start, while rank {self._rank} waited: killed (by a signal, "
                "or because the machine had no memory left), crashed, or with an error that its own log has"
            )


class _Address:
    """What listens at MASTER_ADDR and MASTER_PORT while `rank` tries to reach the store there."""

    def __init__(self, rank: int, size: int, host: str, port: int, serves: bool) -> None:
        self._siblings = _Siblings(rank, size)
        self.rank, self.host, self.port, self.serves = rank, host, port, serves
        self._answers_since: float | None = None
        self._notice = NOTICE_SECONDS

    def look(self, seconds: float) -> None:
        """Raises StartFailed if a program accepts connections but is no store, and if rank 0 does not reach its own
        store, or if another rank of this host has ended. Rank 1 says now and then that it waits."""
        self._siblings.check()
        try:
            socket.create_connection((self.host, self.port), timeout=2.0).close()
        except OSError as error:
            self._say_nobody(seconds, error)
            return
        now = time.monotonic()
        self._answers_since = self._answers_since or now
        if now - self._answers_since > ANSWER_SECONDS:
            raise StartFailed(
                f"rank {self.rank}: the program at {self.host}:{self.port} (MASTER_ADDR, MASTER_PORT) is not the store "
                f"of a run: it accepts connections, but has not answered for {ANSWER_SECONDS:g} s; give another port"
            )

    def _say_nobody(self, seconds: float, error: OSError) -> None:
        self._answers_since = None
        text = (
            f"rank {self.rank} has waited {seconds:.0f} s for the store of the run at {self.host}:{self.port}: {error}"
        )
        if self.serves and seconds > ANSWER_SECONDS:
            raise StartFailed(f"{text}; MASTER_ADDR must be this host, where rank 0 runs") from None
        if self.rank == 1 and seconds > self._notice:
            self._notice += NOTICE_SECONDS
            print(text, file=sys.stderr, flush=True)


def _server(of_torchrun: bool) -> str:
    return "torchrun of node 0" if of_torchrun else "rank 0"


def _named(ranks: Sequence[int]) -> str:
    more = f", ... ({len(ranks)} ranks)" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED_RANKS]))}{more}"
