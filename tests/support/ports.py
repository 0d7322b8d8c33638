"""Finds free ports for MASTER_PORT."""

import fcntl
import itertools
import os
import socket
import tempfile
from functools import cache

_FIRST, _LAST = 10_000, 32_000
"""These ports are below those of outgoing connections, so that no connection takes one before it is used."""

_numbers = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """Returns a free port that belongs to this process until it ends: no call of this function returns it again, not in
    another process of the same user either. Tests do not write port numbers of their own."""
    for number in _numbers:
        port = _FIRST + number % (_LAST - _FIRST)
        with socket.socket() as probe:
            try:
                fcntl.lockf(_taken_ports(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the numbers do not end")


@cache
def _taken_ports() -> int:
    """Descriptor of a file in which the lock of byte n, which ends with its process, marks port n as taken."""
    file = os.path.join(tempfile.gettempdir(), f"ports-of-tests-{os.getuid()}")
    return os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
