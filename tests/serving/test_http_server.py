"""The server's limits: sizes, times, connections, and clients that break the protocol or leave."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from megatron.serving.http_server import HttpError, HttpLimits, HttpRequest, HttpResponse, HttpServer, json_response


class Echo:
    """Answers with what it was asked; /slow waits, /stream counts, /fails raises."""

    def __init__(self) -> None:
        self.left: list[str] = []

    def check(self, request: HttpRequest) -> None:
        if request.path == "/no":
            raise HttpError(404, "there is no /no")

    async def answer(self, request: HttpRequest) -> HttpResponse:
        try:
            if request.path == "/slow":
                await asyncio.sleep(60)
            if request.path == "/fails":
                raise ValueError("a mistake")
        except asyncio.CancelledError:
            self.left.append(request.path)
            raise
        if request.path == "/stream":
            return HttpResponse(content_type="text/plain", stream=self._count())
        return json_response({"method": request.method, "path": request.path, "body": request.body.decode()})

    async def _count(self):
        try:
            for number in range(200):
                yield f"{number}\n".encode()
                await asyncio.sleep(0.005 if number > 3 else 0)
                if number == 3:
                    self.left.append("began")
        finally:
            self.left.append("stream")


@contextlib.contextmanager
def running(**limits) -> Iterator[tuple[int, Echo, HttpServer]]:
    loop, started, stop, application = asyncio.new_event_loop(), threading.Event(), asyncio.Event(), Echo()
    server, ports = HttpServer(application, HttpLimits(**limits)), []

    async def run() -> None:
        ports.append(await server.start("127.0.0.1", 0))
        started.set()
        await stop.wait()
        await server.drain(0.2)
        await server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert started.wait(30)
    try:
        yield ports[0], application, server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
        assert not thread.is_alive() and server.num_connections == 0


def ask(port: int, data: bytes, *, ends: bool = False) -> bytes:
    """Everything that the server answers to these bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def until(condition) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true")


def test_requests_of_one_connection() -> None:
    with running() as (port, _, _):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for body in ("", "text " * 50_000):
            client.request("POST", "/a?b=c", body)
            answer = client.getresponse()
            assert json.loads(answer.read()) == {"method": "POST", "path": "/a", "body": body}
        client.request("HEAD", "/a")
        assert client.getresponse().read() == b""
        client.request("POST", "/chunks", iter([b"a", b"b" * 100]))
        assert json.loads(client.getresponse().read())["body"] == "a" + "b" * 100
        both = b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = ask(port, both)
        assert answer.index(b'"/1"') < answer.index(b'"/2"')


def test_what_breaks_the_protocol_gets_one_answer() -> None:
    with running(body_bytes=100) as (port, _, _):
        for data, status, message in (
            (b"hello\r\n\r\n", 400, "no HTTP/1.1"),
            (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
            (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 99_999 + b"\r\n\r\n", 431, "no HTTP/1.1"),
            (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400, "Content-Length"),
            (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n", 413, "the limit is 100"),
            (b"POST /no HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", 404, "no /no"),
            (b"GET /fails HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 500, "its log says why"),
        ):
            found = error_of(ask(port, data, ends=b"fails" not in data))
            assert found[0] == status and message in found[1], (data[:60], found)


def test_a_huge_body_is_refused_before_it_comes() -> None:
    """With a size, without one, and from a client that waits for permission to send."""
    with running(body_bytes=1000) as (port, _, _):
        head = b"POST /a HTTP/1.1\r\nHost: x\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(head + b"Content-Length: 1073741824\r\nExpect: 100-continue\r\n\r\n")
            assert b" 413 " in client.recv(1 << 16).splitlines()[0]
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        found = error_of(ask(port, head + b"Transfer-Encoding: chunked\r\n\r\n" + 50 * chunk, ends=True))
        assert found == (413, "the body has 65,536 bytes or more, and the limit is 1,000; send less") or found[0] == 413
        sent = error_of(ask(port, head + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000, ends=True))
        assert sent[0] == 413


def test_slow_requests_and_idle_connections_end() -> None:
    with running(read_seconds=0.3) as (port, _, _):
        assert ask(port, b"") == b""
        assert error_of(ask(port, b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab"[:40]))[0] == 408
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
            assert b" 408 " in client.recv(1 << 16).splitlines()[0]


def test_clients_that_leave_cancel_their_requests() -> None:
    with running() as (port, application, _):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(0.1)
        until(lambda: "/slow" in application.left)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            until(lambda: "began" in application.left)
        until(lambda: "stream" in application.left)
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        client.request("GET", "/a")
        assert client.getresponse().status == 200


@pytest.mark.slow_cases("1000")
@pytest.mark.parametrize("count", [50, 1000])
def test_many_connections(count: int) -> None:
    """More than the limit: each further one is told so, and the server goes on when they are gone."""
    most = 3 * count // 10
    with running(connections=most, read_seconds=60) as (port, _, server):
        held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(most)]
        until(lambda: server.num_connections == most)
        refused = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(count - most)]
        for client in refused:
            client.shutdown(socket.SHUT_WR)
        for client in refused:
            answer = b"".join(iter(lambda client=client: client.recv(1 << 16), b""))
            status, message = error_of(answer)
            assert status == 503 and message.startswith(f"{most} connections are open")
            client.close()
        held[0].sendall(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in held[0].recv(1 << 16).splitlines()[0]
        for client in held:
            client.close()
        until(lambda: server.num_connections == 0)
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        client.request("GET", "/a")
        assert client.getresponse().status == 200


@pytest.mark.slow
def test_a_client_that_does_not_read_is_left() -> None:
    with running(write_seconds=0.5) as (port, application, _):
        application._count = lambda: _flood(application)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            until(lambda: "flood" in application.left)


async def _flood(application: Echo):
    try:
        while True:
            yield b"x" * 100_000
    finally:
        application.left.append("flood")


def test_open_answers_are_finished_and_idle_connections_closed() -> None:
    async def run() -> None:
        server = HttpServer(Echo(), HttpLimits())
        port = await server.start("127.0.0.1", 0)
        idle, _ = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readline()
        draining = asyncio.ensure_future(server.drain(60.0))
        assert await idle.read() == b"" and not draining.done()
        assert (await reader.read()).endswith(b"199\n\r\n0\r\n\r\n")
        await draining
        await server.close()
        writer.close()

    asyncio.run(run())
