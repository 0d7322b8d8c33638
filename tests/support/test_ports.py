"""Processes that look for a port at the same time find different ones."""

import itertools
import multiprocessing
import socket

import pytest
from support import ports
from support.ports import free_port


def test_no_process_gets_the_port_of_another() -> None:
    with multiprocessing.get_context("fork").Pool(1) as other:
        # Both processes now count from the same number.
        theirs = other.apply(some_ports)
        ours = some_ports()
        assert len({*ours, *theirs}) == len(ours) + len(theirs)


def some_ports() -> list[int]:
    return [free_port() for _ in range(5)]


def test_a_port_that_is_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    used = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", used))
        monkeypatch.setattr(ports, "_numbers", itertools.count(used - ports._FIRST))
        assert free_port() != used


def test_ports_are_below_those_of_outgoing_connections() -> None:
    assert all(ports._FIRST <= port < ports._LAST < 32_768 for port in some_ports())
