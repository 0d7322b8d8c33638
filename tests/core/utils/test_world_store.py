"""Ranks that do not find each other end with a sentence that says why."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.ports import free_port

from megatron.core.utils import world_store
from megatron.core.utils.world_store import StartFailed, connect_to_store, wait_for_ranks, wait_for_value


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> int:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return port


@contextlib.contextmanager
def stranger(port: int) -> Iterator[None]:
    """A program that accepts connections and says nothing."""
    accepted = []
    with socket.create_server(("", port)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()


def test_a_port_of_another_program_is_named(address: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_store, "ANSWER_SECONDS", 0.2)
    with stranger(address):
        with pytest.raises(StartFailed, match=f"PORT {address}: rank 0 cannot serve .*another program uses this port"):
            connect_to_store(0, 2)
        with pytest.raises(StartFailed, match=f"rank 1: the program at 127.0.0.1:{address} .* is not the store of a"):
            connect_to_store(1, 2)


def test_a_store_that_nobody_serves(address: int) -> None:
    with pytest.raises(StartFailed, match="rank 1 has not reached the store of the run, which rank 0 serves"):
        connect_to_store(1, 2, timedelta(seconds=0.5))


def test_rank_0_serves_on_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_store, "ANSWER_SECONDS", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(StartFailed, match=r"no\.such\.host\.invalid.*"):
        connect_to_store(0, 2, timedelta(seconds=3))


def test_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(world_store, "NOTICE_SECONDS", 0.0)
    store = connect_to_store(0, 4)
    store.set("joined 2", "")
    with pytest.raises(StartFailed, match=r"ranks 1, 3 of 4 did not start within 0 s .*look into their logs"):
        wait_for_ranks(store, 0, 4, timedelta(seconds=0.1))
    assert "rank 0 waits for ranks 1, 3 of 4 to start" in capsys.readouterr().err
    others = [threading.Thread(target=wait_for_ranks, args=(store, rank, 4)) for rank in (1, 3)]
    for other in others:
        other.start()
    wait_for_ranks(store, 0, 4)
    for other in others:
        other.join()


def test_a_rank_that_waits_ends_with_its_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_store, "ended_siblings", lambda: [1])
    store = dist.HashStore()
    began = time.monotonic()
    with pytest.raises(StartFailed, match="rank 1 of 2 ended in start, while rank 0 waited: killed"):
        wait_for_ranks(store, 0, 2)
    with pytest.raises(StartFailed, match="rank 1 of 4 ended in start, while rank 2 waited"):
        wait_for_value(store, "heartbeat", 2, 4)
    assert time.monotonic() - began < 60
