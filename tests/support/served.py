"""A server of a small model in a thread of the test."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from support.generating_models import build

from megatron.core.inference.call_channel import CallChannel
from megatron.core.inference.engine import Engine
from megatron.core.inference.layout_forward import LayoutForward
from megatron.core.inference.paged_context import PagedInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.null import NullTokenizer
from megatron.serving.api import Api, ApiLimits
from megatron.serving.engine_thread import EngineThread
from megatron.serving.http_server import HttpLimits, HttpServer
from megatron.serving.openai_requests import ServedModel

LOCAL = frozenset({"localhost", "127.0.0.1"})


@dataclass
class Served:
    url: str
    port: int
    model: GPTModel
    engine: Engine
    api: Api
    server: HttpServer


@contextlib.contextmanager
def served(
    *,
    tokenizer: Tokenizer | None = None,
    chat=None,
    slots: int = 4,
    pages: int = 60,
    ends: tuple[int, ...] = (),
    limits: ApiLimits | None = None,
    http: HttpLimits | None = None,
    api_key: str | None = None,
) -> Iterator[Served]:
    """Its texts are ids from 0 to 35, with blanks between; it has 24 positions."""
    gpt = build({}, {"position_embedding_type": "rope"})
    engine = Engine(LayoutForward(gpt), PagedInferenceContext(pages, 2, slots, 24), CallChannel(None), prefill_tokens=8)
    tokenizer = tokenizer or NullTokenizer(36)
    model = ServedModel("small", tokenizer, chat, "it has no template", 36, ends, ends, 24, 8)
    loop, started, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found = []

    async def run() -> None:
        thread = EngineThread(engine, lambda: None)
        api = Api(thread, model, limits or ApiLimits(20, 60.0), api_key=api_key, local_names=LOCAL)
        server = HttpServer(api, http or HttpLimits())
        port = await server.start("127.0.0.1", 0)
        thread.start()
        found.append(Served(f"http://127.0.0.1:{port}", port, gpt, engine, api, server))
        started.set()
        await stop.wait()
        thread.stop()
        await asyncio.to_thread(thread.join)
        await server.close()

    runner = threading.Thread(target=lambda: loop.run_until_complete(run()))
    runner.start()
    assert started.wait(60)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        runner.join(60)
        loop.close()
