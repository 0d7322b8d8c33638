"""The sockets of the first rank, to which the heartbeats of all ranks go. `watch.Watch` decides what they mean."""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron.training.launch.watch import Limits, Message, Watch

_TICK_SECONDS = 0.1

_RANKS_PER_TICK_SECOND = 10_000
"""A decision about more ranks takes longer, so it is made less often."""

_LONGEST_GREETING = 1 << 14
"""Bytes that a connection may send before it has sent the token."""


class HeartbeatServer:
    """Listens to the ranks in a thread, and tells them to end if one has failed.

    Args:
        size: number of ranks.
        limits: time limits for signs of life and other answers.
        token: a secret of the run; connections without it are closed.
        interval: seconds between two signs of life to the ranks.
        where: returns phase and iteration of this process, the first rank.
    """

    def __init__(
        self,
        size: int,
        limits: Limits,
        token: str,
        interval: float = 1.0,
        where: Callable[[], Message] = dict,
    ) -> None:
        self.watch = Watch(size, limits)
        self.token = token
        self.interval = interval
        self._where = where
        self._ranks: dict[socket.socket, int] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="heartbeat-server", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Closes the sockets: at the end, and in a forked process, which would keep them open after this process has
        ended."""
        for connection in self._buffers:
            connection.close()
        self._listener.close()
        self._selector.close()

    def tell_phase(self, phase: str, iteration: int | None) -> None:
        """Tells all ranks the phase of rank 0. The main thread calls this: rank 0 may be gone before another thread
        runs."""
        line = json.dumps({"type": "beat", "phase": phase, "iteration": iteration}).encode() + b"\n"
        for connection in list(self._ranks):
            with contextlib.suppress(OSError):
                connection.send(line)

    def stop(self) -> None:
        """Ends the thread."""
        self._over = True
        self._thread.join(5.0)

    def _serve(self) -> None:
        try:
            self._watch_ranks()
        finally:
            self._over = True
            self.close()

    def _watch_ranks(self) -> None:
        last_beat, last_tick, told_phase = 0.0, 0.0, None
        pause = max(_TICK_SECONDS, self.watch.size / _RANKS_PER_TICK_SECOND)
        while not self._over:
            for key, _ in self._selector.select(pause):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
            now = time.monotonic()
            first = self.watch.ranks.get(0)
            if now - last_beat > self.interval or (first is not None and first.phase != told_phase):
                last_beat = now
                told_phase = None if first is None else first.phase
                where = {**self._where(), "elsewhere": self.watch.first_elsewhere()}
                self._send_all([(rank, {"type": "beat", **where}) for rank in self._ranks.values()])
            if now - last_tick < pause:
                continue
            last_tick = now
            self._send_all(self.watch.tick(now))
            if self.watch.ranks and self.watch.all_left() and self.watch.cause is None:
                self._send_all([(rank, {"type": "bye"}) for rank in self._ranks.values()])
                return

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:  # no other connection waits
                return
            except OSError:  # out of file descriptors: the rank is not watched until others have closed theirs
                time.sleep(_TICK_SECONDS)
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._buffers[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        *lines, self._buffers[connection] = (self._buffers[connection] + data).split(b"\n")
        for line in lines:
            try:
                self._understand(connection, json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):  # not sent by a rank of this run
                self._drop(connection)
                return
        if connection not in self._ranks and len(self._buffers[connection]) > _LONGEST_GREETING:
            self._drop(connection)

    def _understand(self, connection: socket.socket, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if connection in self._ranks:
            self.watch.receive(self._ranks[connection], message, now)
        elif message["type"] == "hello" and message["token"] == self.token:
            self._ranks[connection] = message["rank"]
            self.watch.join(message["rank"], message, now)
        else:
            raise ValueError("a stranger")

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._buffers.pop(connection, None)
        rank = self._ranks.pop(connection, None)
        if rank is not None:
            self.watch.lost(rank, time.monotonic())

    def _send_all(self, messages: list[tuple[int, Message]]) -> None:
        connections = {rank: connection for connection, rank in self._ranks.items()}
        for rank, message in messages:
            connection = connections.get(rank)
            if connection is not None:
                with contextlib.suppress(OSError):  # a stopped rank reads nothing; a lost one is noticed by `_read`
                    connection.send(json.dumps(message).encode() + b"\n")
