"""An HTTP/1.1 server with limits: h11 reads and writes the protocol, asyncio the sockets.

Every connection, request and answer is bounded in size and time, and every refusal is one JSON object in OpenAI's form.
"""

import asyncio
import contextlib
import json
import sys
import traceback
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import h11

_CHUNK = 1 << 16
_HEADER_BYTES = 1 << 14
_LINGER_SECONDS = 5.0
"""Time in which the rest of a refused request is read, so that the client reads the answer instead of a reset."""


@dataclass(eq=False)
class HttpError(Exception):
    """An answer with an error, in OpenAI's form."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, object]:
        """The JSON object of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class HttpRequest:
    """A request without the name of its client."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes = b""


@dataclass(frozen=True)
class HttpResponse:
    """An answer: a body, or a stream of parts."""

    body: bytes = b""
    content_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: AsyncGenerator[bytes, None] | None = None
    """Parts of the body. The server closes it when the client has left."""


class Application(Protocol):
    """What answers requests."""

    def check(self, request: HttpRequest) -> None:
        """Raises HttpError for a request that is refused before its body is read."""

    async def answer(self, request: HttpRequest) -> HttpResponse:
        """Returns the answer. Raises HttpError for a refusal. It is cancelled when the client leaves."""
        ...


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of the server."""

    connections: int = 512
    body_bytes: int = 4 << 20
    read_seconds: float = 30.0
    """Time for a request to arrive, and time without a request after which a connection is closed."""
    write_seconds: float = 30.0
    """Time in which a client must take a part of the answer."""


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Returns an answer with a JSON value."""
    return HttpResponse(json.dumps(value, ensure_ascii=False).encode(), status=status, headers=headers or {})


class HttpServer:
    """Listens on one address."""

    def __init__(self, application: Application, limits: HttpLimits) -> None:
        self.application, self.limits = application, limits
        self.num_connections = 0
        self._open: dict[_Connection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Begins to listen. Returns the port, which the system chooses for 0. Raises OSError if the address cannot be
        used."""
        self._server = await asyncio.start_server(self._connected, host, port, limit=_CHUNK, backlog=2048)
        return int(self._server.sockets[0].getsockname()[1])

    async def drain(self, seconds: float) -> None:
        """Stops listening, closes idle connections, and waits at most so long until open answers are finished."""
        assert self._server is not None
        self._server.close()
        for connection, task in self._open.items():
            connection.is_last = True
            if not connection.is_answering:
                task.cancel()
        if self._open:
            await asyncio.wait(self._open.values(), timeout=seconds)

    async def close(self) -> None:
        """Stops listening and ends all connections."""
        assert self._server is not None
        self._server.close()
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(reader, writer, self.application, self.limits)
        self._open[connection] = task
        self.num_connections += 1
        try:
            if self.num_connections > self.limits.connections:
                await connection.refuse(
                    HttpError(
                        503,
                        f"{self.limits.connections} connections are open, which is the limit; try again later",
                        kind="server_error",
                        code="too_many_connections",
                        headers={"Retry-After": "1"},
                    )
                )
            else:
                await connection.serve()
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass  # the client is gone, or the server ends
        finally:
            self.num_connections -= 1
            del self._open[connection]
            writer.close()
            with contextlib.suppress(ConnectionError, TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), _LINGER_SECONDS)


class _Connection:
    """One connection, whose requests are answered one after the other."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        application: Application,
        limits: HttpLimits,
    ) -> None:
        self.reader, self.writer, self.application, self.limits = reader, writer, application, limits
        self.is_answering = False
        self.is_last = False
        """Whether the connection is closed after the current answer."""
        self.protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEADER_BYTES)

    async def serve(self) -> None:
        """Answers requests until one side closes the connection."""
        while True:
            try:
                request = await asyncio.wait_for(self._read(), self.limits.read_seconds)
            except TimeoutError:
                if self.protocol.their_state is h11.IDLE and not self.protocol.trailing_data[0]:
                    return  # nothing was asked
                return await self.refuse(HttpError(408, "the request did not arrive in time", code="timeout"))
            except h11.RemoteProtocolError as error:
                return await self.refuse(HttpError(error.error_status_hint, f"the request is no HTTP/1.1: {error}"))
            except HttpError as error:
                return await self.refuse(error)
            if request is None:
                return
            self.is_answering = True
            if not await self._handle(request) or self.is_last:
                return
            self.is_answering = False
            if self.protocol.our_state is not h11.DONE or self.protocol.their_state is not h11.DONE:
                return
            self.protocol.start_next_cycle()

    async def refuse(self, error: HttpError) -> None:
        """Answers with an error and closes the connection. What the client still sends is thrown away."""
        if self.protocol.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self._respond(HttpRequest("GET", "", {}), _response_of(error), close=True)
        if self.writer.can_write_eof():
            self.writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while await self.reader.read(_CHUNK):
                    pass

    async def _read(self) -> HttpRequest | None:
        """Returns the next request; None if there is none. Raises HttpError for one that is refused."""
        head: HttpRequest | None = None
        body = bytearray()
        while True:
            event = self.protocol.next_event()
            if event is h11.NEED_DATA:
                if head is not None and self.protocol.they_are_waiting_for_100_continue:
                    await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                self.protocol.receive_data(await self.reader.read(_CHUNK))
            elif isinstance(event, h11.Request):
                head = _request_of(event)
                length = head.headers.get("content-length", "0")
                self._check_size(int(length) if length.isdecimal() else 0)
                self.application.check(head)
            elif isinstance(event, h11.Data):
                body += event.data
                self._check_size(len(body))
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                return HttpRequest(head.method, head.path, head.headers, bytes(body))
            else:  # the client has closed the connection
                return None

    def _check_size(self, size: int) -> None:
        if size > self.limits.body_bytes:
            raise HttpError(
                413,
                f"the body has {size:,} bytes or more, and the limit is {self.limits.body_bytes:,}; send less",
                code="body_too_large",
            )

    async def _handle(self, request: HttpRequest) -> bool:
        """Answers a request. Returns False if the client has left."""
        answering = asyncio.ensure_future(self._answer(request))
        leaving = asyncio.ensure_future(self._until_client_leaves())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            return answering.done()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _until_client_leaves(self) -> None:
        while not self.reader.at_eof():
            data = await self.reader.read(_CHUNK)
            if data:  # the next request of a client that does not wait for the answer
                self.protocol.receive_data(data)
                if len(self.protocol.trailing_data[0]) > _CHUNK:
                    await asyncio.Event().wait()

    async def _answer(self, request: HttpRequest) -> None:
        try:
            response = await self.application.answer(request)
        except HttpError as error:
            response = _response_of(error)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            response = _response_of(HttpError(500, "the server failed; its log says why", kind="server_error"))
        await self._respond(request, response)

    async def _respond(self, request: HttpRequest, response: HttpResponse, *, close: bool = False) -> None:
        headers = [("Content-Type", response.content_type), ("X-Content-Type-Options", "nosniff")]
        headers += list(response.headers.items())
        headers += [("Connection", "close")] if close else []
        if response.stream is None:
            headers.append(("Content-Length", str(len(response.body))))
        await self._send(h11.Response(status_code=response.status, headers=headers, reason=b""))
        if request.method != "HEAD":
            if response.stream is None:
                await self._send(h11.Data(response.body))
            else:
                async with contextlib.aclosing(response.stream) as parts:
                    async for part in parts:
                        await self._send(h11.Data(part))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Response | h11.InformationalResponse | h11.Data | h11.EndOfMessage) -> None:
        data = self.protocol.send(event)
        if data:
            self.writer.write(data)
            transport = self.writer.transport
            if transport.get_write_buffer_size() or transport.is_closing():  # wait_for starts a task, for each token
                await asyncio.wait_for(self.writer.drain(), self.limits.write_seconds)


def _request_of(event: h11.Request) -> HttpRequest:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.headers}
    path = event.target.decode("latin-1").partition("?")[0]
    return HttpRequest(event.method.decode("latin-1"), path, headers)


def _response_of(error: HttpError) -> HttpResponse:
    return json_response(error.body, error.status, error.headers)
