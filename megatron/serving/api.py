"""The routes of the server: OpenAI's completions and chat, the list of models, health, metrics, and a page."""

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from megatron.core.exceptions import UserError
from megatron.serving.answers import Form, Json, Piece, WrittenText, merged, usage_of, write_choice
from megatron.serving.engine_thread import EngineThread
from megatron.serving.http_server import HttpError, HttpRequest, HttpResponse, json_response
from megatron.serving.metrics import Metrics
from megatron.serving.openai_requests import ServedModel, WritingRequest, read_chat, read_completion
from megatron.serving.page import PAGE, PAGE_POLICY

Reader = Callable[[bytes, ServedModel], WritingRequest]

_NOT_HERE = {
    "/v1/embeddings": "embedding models are not served: this is a language model; average its hidden states yourself",
    "/v1/rerank": "reranking models are not served: compare log-probabilities of /v1/completions with echo instead",
    "/v1/responses": "use /v1/chat/completions, which has the same content",
}


@dataclass(frozen=True)
class ApiLimits:
    """What clients may ask for."""

    open_texts: int
    """Number of texts that are written or wait; further ones are refused."""
    request_seconds: float
    """Time in which an answer must be finished."""


class Api:
    """Answers requests; an `Application` of `HttpServer`."""

    def __init__(
        self,
        thread: EngineThread,
        model: ServedModel,
        limits: ApiLimits,
        *,
        api_key: str | None = None,
        local_names: frozenset[str] = frozenset(),
    ) -> None:
        """Without an `api_key` requests must name one of the hosts `local_names`, so that no page of another site
        reaches the server through a browser."""
        self.thread, self.model, self.limits = thread, model, limits
        self._api_key, self._local_names = api_key, local_names
        self._open_texts = 0
        self._started = int(time.time())
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self.metrics = self._new_metrics()
        self._routes: dict[tuple[str, str], Callable[[HttpRequest], Awaitable[HttpResponse]]] = {
            ("GET", "/"): self._page,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("GET", f"/v1/models/{model.name}"): self._one_model,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._chat,
        }

    def _new_metrics(self) -> Metrics:
        metrics, engine = Metrics(), self.thread.engine
        metrics.counter("requests_total", "Answered requests by path and status.")
        metrics.counter("prompt_tokens_total", "Tokens of prompts.")
        metrics.counter("generated_tokens_total", "Tokens of texts.")
        metrics.counter("abandoned_requests_total", "Requests whose client left before the answer was complete.")
        metrics.counter("first_token_seconds_sum", "Seconds from a request to its first token, summed.")
        metrics.counter("first_token_seconds_count", "Requests that have a first token.")
        metrics.gauge("running_texts", "Texts that are being written.", lambda: engine.num_running)
        metrics.gauge("waiting_texts", "Texts that wait.", lambda: engine.num_waiting)
        metrics.gauge("used_pages", "Pages of the cache that texts use.", lambda: engine.num_used_pages)
        metrics.gauge("pages", "Pages of the cache.", lambda: engine.context.num_pages - 1)
        return metrics

    # -----------------------------------------------------------------------------------------------------------------
    # Requests

    def check(self, request: HttpRequest) -> None:
        """Refuses a request before its body is read: a wrong path or method, a missing key, another site's page."""
        method = "GET" if request.method == "HEAD" else request.method
        if (method, request.path) not in self._routes:
            self._refuse_path(request)
        if self._api_key is None:
            self._check_origin(request)
        elif request.path not in ("/", "/health"):
            given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(), self._api_key.encode()):
                raise HttpError(
                    401,
                    "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def _refuse_path(self, request: HttpRequest) -> None:
        methods = sorted(method for method, path in self._routes if path == request.path)
        if methods:
            allowed = ", ".join(methods)
            raise HttpError(405, f"{request.path} takes {allowed}, not {request.method}", headers={"Allow": allowed})
        if request.path.startswith("/v1/models/"):
            message = f"model {request.path[11:91]!r} is not served here; {self.model.name!r} is"
            raise HttpError(404, message, code="model_not_found", param="model")
        known = ", ".join(sorted(path for _, path in self._routes))
        why = _NOT_HERE.get(request.path, f"there is no {request.path[:80]}; there are {known}")
        raise HttpError(404, why, code="unknown_url")

    def _check_origin(self, request: HttpRequest) -> None:
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        name = _host_name(host)
        if name is not None and name not in self._local_names:
            raise HttpError(403, f"the server answers to {', '.join(sorted(self._local_names))}, not to {name[:80]}")
        if origin is not None and urlsplit(origin).netloc != host:
            raise HttpError(403, "pages of other sites may not use this server; start it with --api-key for that")

    async def answer(self, request: HttpRequest) -> HttpResponse:
        """Returns the answer to a request that `check` has accepted."""
        status = 500
        try:
            method = "GET" if request.method == "HEAD" else request.method
            response = await self._routes[method, request.path](request)
            status = response.status
            return response
        except HttpError as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = 499
            self.metrics.add("abandoned_requests_total")
            raise
        finally:
            self.metrics.add("requests_total", path=request.path, status=str(status))

    async def _page(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(PAGE, "text/html; charset=utf-8", headers={"Content-Security-Policy": PAGE_POLICY})

    async def _health(self, request: HttpRequest) -> HttpResponse:
        alive = self.thread.is_alive() and self.thread.failure is None
        return json_response({"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503)

    async def _metrics(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(self.metrics.text().encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: HttpRequest) -> HttpResponse:
        return json_response({"object": "list", "data": [self._described]})

    async def _one_model(self, request: HttpRequest) -> HttpResponse:
        return json_response(self._described)

    @property
    def _described(self) -> Json:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "local",
            "max_model_len": self.model.max_tokens,
            "chats": self.model.chat is not None,
        }

    # -----------------------------------------------------------------------------------------------------------------
    # Texts

    async def _completions(self, request: HttpRequest) -> HttpResponse:
        return await self._write(request, read_completion, chat=False)

    async def _chat(self, request: HttpRequest) -> HttpResponse:
        return await self._write(request, read_chat, chat=True)

    async def _write(self, request: HttpRequest, read: Reader, *, chat: bool) -> HttpResponse:
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        wanted = await loop.run_in_executor(self._tokenizing, read, request.body, self.model)
        new_tokens = self._new_tokens(wanted)
        form = Form(self.model.name, self.model.tokenizer, chat=chat, scores=wanted.num_logprobs is not None)
        ends = self.model.chat_ends if chat else self.model.ends
        self._reserve(wanted)
        self.metrics.add("prompt_tokens_total", sum(len(prompt.ids) for prompt in wanted.prompts))
        pieces = self._pieces(wanted, new_tokens, ends, began)
        if wanted.stream:
            return HttpResponse(
                content_type="text/event-stream",
                headers={"Cache-Control": "no-store"},
                stream=self._events(pieces, wanted, form),
            )
        texts = [WrittenText() for _ in range(len(wanted.prompts) * wanted.choices)]
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                texts[piece.choice].add(piece)
        return json_response(form.whole(texts, sum(len(prompt.ids) for prompt in wanted.prompts)))

    def _new_tokens(self, wanted: WritingRequest) -> int:
        """Returns the number of tokens of a text. Raises HttpError if it does not fit behind the longest prompt."""
        longest, most = max(len(prompt.ids) for prompt in wanted.prompts), self.model.max_tokens
        new, room = wanted.max_new_tokens, most - longest
        if new is None:
            new = min(self.model.default_new_tokens, max(1, room))
        if new > room:
            works = f"max_tokens {room} works" if room > 0 else f"shorten it to at most {most - 1}"
            raise HttpError(
                400,
                f"the prompt has {longest} tokens and max_tokens is {new}, but prompt and text have room for {most} "
                f"together; {works}",
                code="context_length_exceeded",
                param="max_tokens" if room > 0 else "messages" if wanted.prompts[0].text is None else "prompt",
            )
        return new

    def _reserve(self, wanted: WritingRequest) -> None:
        count, most = len(wanted.prompts) * wanted.choices, self.limits.open_texts
        if count > most:
            raise HttpError(400, f"{count} texts in one request, and the limit is {most}; ask for fewer", param="n")
        if self._open_texts + count > most:
            raise HttpError(
                429,
                f"{self._open_texts} texts are open, and the limit is {most}; try again later",
                kind="rate_limit_error",
                code="too_many_texts",
                headers={"Retry-After": "1"},
            )

    async def _pieces(
        self, wanted: WritingRequest, new_tokens: int, ends: tuple[int, ...], began: float
    ) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of all choices, within the time limit."""
        writings = [
            write_choice(self.thread, self.model.tokenizer, wanted, prompt, number, new_tokens, ends)
            for number, prompt in enumerate(prompt for prompt in wanted.prompts for _ in range(wanted.choices))
        ]
        self._open_texts += len(writings)
        has_token = False
        deadline = began + self.limits.request_seconds
        try:
            async with contextlib.aclosing(merged(writings)) as pieces:
                while True:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        piece = await anext(pieces, None)
                    if piece is None:
                        return
                    self.metrics.add("generated_tokens_total", piece.count)
                    if piece.count and not has_token:
                        has_token = True
                        self.metrics.add("first_token_seconds_sum", time.monotonic() - began)
                        self.metrics.add("first_token_seconds_count")
                    yield piece
        except TimeoutError:
            seconds = f"{self.limits.request_seconds:g} seconds"
            raise HttpError(504, f"the text was not finished in {seconds}; ask for fewer tokens", "timeout") from None
        except UserError as error:
            raise HttpError(400, str(error)) from None
        finally:
            self._open_texts -= len(writings)

    async def _events(
        self, pieces: AsyncGenerator[Piece, None], wanted: WritingRequest, form: Form
    ) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream (text/event-stream)."""
        begun: set[int] = set()
        count, complete = 0, False
        usage: Json = {"usage": None} if wanted.includes_usage else {}
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    count += piece.count
                    if piece.text or piece.finish or piece.tokens:
                        yield _event({**form.part(piece, begins=piece.choice not in begun), **usage})
                        begun.add(piece.choice)
            if wanted.includes_usage:
                prompt_tokens = sum(len(prompt.ids) for prompt in wanted.prompts)
                yield _event({**form.of_choices([]), "usage": usage_of(prompt_tokens, count)})
            complete = True
            yield b"data: [DONE]\n\n"
        except HttpError as error:
            complete = True
            yield _event(error.body)
        finally:
            if not complete:
                self.metrics.add("abandoned_requests_total")


def _host_name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname if host else None
    except ValueError:
        return host


def _event(value: Json) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
