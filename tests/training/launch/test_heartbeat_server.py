"""The sockets of the first rank."""

import json
import socket
import time

from megatron.training.launch.heartbeat_server import HeartbeatServer
from megatron.training.launch.watch import Limits


def connect(server: HeartbeatServer, token: str, rank: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20.0)
    send(connection, type="hello", token=token, rank=rank, machine="a", pid=rank)
    return connection


def send(connection: socket.socket, **message: object) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def wait_for(server: HeartbeatServer, ranks: int) -> None:
    end = time.monotonic() + 20.0
    while len(server.watch.ranks) < ranks:
        assert time.monotonic() < end
        time.sleep(0.01)


def types_until_closed(connection: socket.socket) -> list[str]:
    with connection, connection.makefile() as lines:
        return [json.loads(line)["type"] for line in lines]


def is_sent_away(server: HeartbeatServer, noise: bytes) -> bool:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20.0) as stranger:
        stranger.sendall(noise)
        try:
            return stranger.recv(1) == b""
        except ConnectionResetError:  # the server did not read all of it
            return True


def test_strangers_are_sent_away_and_a_lost_rank_ends_the_run() -> None:
    server = HeartbeatServer(2, Limits(report=0.0), "secret", interval=60.0)
    server.start()
    ranks = [connect(server, "secret", rank) for rank in range(2)]
    wait_for(server, 2)
    assert types_until_closed(connect(server, "another", 2)) == []
    for noise in (b"GET / HTTP/1.1\n", b"[" * 10_000 + b"\n", b"1\n", b" " * 20_000):
        assert is_sent_away(server, noise)
    assert sorted(server.watch.ranks) == [0, 1]
    ranks[1].close()
    while not server.watch.ended:
        time.sleep(0.01)
    server.stop()
    assert types_until_closed(ranks[0]) == ["beat", "report", "end"]


def test_ranks_are_let_go_when_all_have_finished() -> None:
    server = HeartbeatServer(2, Limits(), "secret", interval=60.0)
    server.start()
    ranks = [connect(server, "secret", rank) for rank in range(2)]
    wait_for(server, 2)
    for rank in ranks:
        send(rank, type="bye", phase="exit", iteration=3)
    assert [types_until_closed(rank)[-1] for rank in ranks] == ["bye", "bye"]
    server.stop()
