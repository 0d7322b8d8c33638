"""Finds free ports for MASTER_PORT."""

import itertools
import os
import socket

_FIRST, _LAST = 10_000, 32_000
"""These ports are below those of outgoing connections, so that no connection takes one before it is used."""

_numbers = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """Returns a free port. The calls of one process return different ports, and processes start at different ones."""
    for number in _numbers:
        port = _FIRST + number % (_LAST - _FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the numbers do not end")
