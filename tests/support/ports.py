"""Ports for ranks that meet through MASTER_PORT."""

import itertools
import os
import socket

_FIRST, _LAST = 10_000, 32_000
"""Below the ports that the system gives to outgoing connections: those of other ranks could take ours meanwhile."""

_numbers = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """A port that nobody listens at. No two calls of a process give the same, and processes begin at different ones."""
    for number in _numbers:
        port = _FIRST + number % (_LAST - _FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("there is always another number")
