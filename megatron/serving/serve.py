"""Serves a trained model until a signal ends the program."""

import asyncio
import dataclasses
import signal
import sys
from collections.abc import Callable

import torch

from megatron.conversion.tokenizer_files import end_ids
from megatron.core.communication.collectives import Group, all_reduce
from megatron.core.exceptions import UserError
from megatron.core.inference.cache_size import CacheSize, measure_cache
from megatron.core.inference.call_channel import CallChannel, follow
from megatron.core.inference.decoding_graphs import DecodingGraphs
from megatron.core.inference.engine import Engine
from megatron.core.inference.layout_forward import LayoutForward
from megatron.core.inference.paged_context import PagedInferenceContext
from megatron.core.utils.graph_capture import CudaGraphRecorder
from megatron.data.tokenizer.generation import chat_tokenizer
from megatron.serving.api import Api, ApiLimits
from megatron.serving.config import ModelToServe, ServeConfig
from megatron.serving.engine_thread import EngineThread
from megatron.serving.http_server import HttpLimits, HttpServer
from megatron.serving.openai_requests import ServedModel
from megatron.training.trained_model import TrainedModel

_GIB = 1 << 30
_SHARE_OF_FREE_MEMORY = 0.85
_SWITCH_SECONDS = 0.0005
"""How long the thread of the connections may keep the interpreter while the engine's thread waits for it. The engine's
gives it away in every operation of torch, and Python's 5 ms would then be added to many of them."""
_SIGNALS = signal.SIGTERM, signal.SIGINT


def serve(trained: TrainedModel, source: ModelToServe, config: ServeConfig) -> int:
    """Serves on the first rank, while the other ranks follow it. Returns the exit code: 0 after SIGTERM or Ctrl-C, 1
    if the engine failed. Raises UserError for what cannot be served."""
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    world: Group = group if group is not None and torch.distributed.get_world_size() > 1 else None
    asked = served_model(trained, source, config)
    forward = LayoutForward(trained.model)
    context = build_cache(forward, world, asked.max_tokens, config, say if first else lambda sentence: None)
    model = dataclasses.replace(asked, max_tokens=context.max_sequence_length)
    channel = CallChannel(world)
    if config.dry_run:
        return 0
    if not first:
        for number in _SIGNALS:  # the first rank ends all
            signal.signal(number, signal.SIG_IGN)
        follow(forward, context, channel)
        return 0
    graphs = decoding_graphs(forward, context, world, config)
    engine = Engine(forward, context, channel, prefill_tokens=config.prefill_tokens, graphs=graphs)
    say(f"{model.name}: iteration {trained.iteration}, on {trained.device}")
    if model.chat is None:
        say(f"no /v1/chat/completions: {model.no_chat}")
    return asyncio.run(_serve(engine, model, config))


def say(sentence: str) -> None:
    """Prints a message to stderr."""
    print(sentence, file=sys.stderr, flush=True)


def served_model(trained: TrainedModel, source: ModelToServe, config: ServeConfig) -> ServedModel:
    """Returns what requests are checked against. Raises UserError for a model that writes no text."""
    family, flags = trained.config.model.model_family, trained.config.tokenizer
    if family in ("bert", "t5"):
        raise UserError(
            f"--load {source.load}: a {family.upper()} does not continue texts, so it cannot be served; "
            "tools/generate.py writes with it"
        )
    longest = config.max_sequence_length or trained.max_sequence_length
    learned = trained.config.model.position_embedding_type == "learned_absolute"
    if learned and longest > trained.max_sequence_length:
        raise UserError(
            f"--max-sequence-length {longest}: the model has {trained.max_sequence_length} positions; give no more"
        )
    ends = tuple(end_ids(flags, trained.tokenizer))
    chat, why = None, ""
    try:
        chat = chat_tokenizer(flags, source.chat_template)
        turn_end = chat.turn_end()
    except UserError as error:
        if source.chat_template is not None:
            raise UserError(f"--chat-template: {error}") from None
        chat, why, turn_end = None, str(error), None
    vocab_size = int(getattr(trained.model, "vocab_size", trained.tokenizer.vocab_size))
    return ServedModel(
        source.name,
        trained.tokenizer,
        chat,
        why,
        min(vocab_size, trained.tokenizer.vocab_size),
        ends,
        ends if turn_end is None else tuple(dict.fromkeys((*ends, turn_end))),
        longest,
        config.max_new_tokens,
    )


def build_cache(
    forward: LayoutForward, world: Group, longest: int, config: ServeConfig, tell: Callable[[str], None]
) -> PagedInferenceContext:
    """Makes the cache, and tells its size. Raises UserError if the memory does not suffice for a page. Collective."""
    size = measure_cache(forward, world)
    memory = _memory_for_cache(forward.device, config)
    available = torch.tensor([memory])
    all_reduce(available, world, torch.distributed.ReduceOp.MIN)
    memory = int(available)
    pages = size.pages_within(memory, config.page_size, config.max_texts, longest)
    if pages < 2:
        raise UserError(_too_small(size, memory, config))
    room = (pages - 1) * config.page_size
    tell(
        f"cache: {size.memory(pages, config.page_size, config.max_texts) / _GIB:.2f} GiB for {room:,} tokens in "
        f"{pages - 1:,} pages of {config.page_size} ({size.bytes_per_token / 1024:.1f} KiB for a token); "
        f"{config.max_texts} texts at once, each of up to {longest:,} tokens"
    )
    if room < longest:
        tell(f"the longest text that fits has {room:,} tokens; a larger --cache-gib has room for more")
    return PagedInferenceContext(pages, config.page_size, config.max_texts, min(longest, room))


def decoding_graphs(
    forward: LayoutForward, context: PagedInferenceContext, world: Group, config: ServeConfig
) -> DecodingGraphs | None:
    """Returns what computes decoding steps by CUDA graphs; None: they run eagerly."""
    if not config.decoding_graphs:
        return None
    if forward.device.type != "cuda" or world is not None:
        place = "a CPU" if world is None else "several ranks"
        say(f"WARNING: --decoding-graphs has no effect on {place}: one GPU computes graphs; leave it out")
        return None
    return DecodingGraphs(forward, context, CudaGraphRecorder(forward.device), say)


def _memory_for_cache(device: torch.device, config: ServeConfig) -> int:
    if config.cache_gib is not None:
        return int(config.cache_gib * _GIB)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_FREE_MEMORY)
    return _GIB


def _too_small(size: CacheSize, memory: int, config: ServeConfig) -> str:
    least = size.memory(2, config.page_size, config.max_texts) / _GIB
    given = "the free memory" if config.cache_gib is None else f"--cache-gib {config.cache_gib:g}"
    return (
        f"{given}: {memory / _GIB:.3f} GiB have no room for a page of {config.page_size} tokens beside the states of "
        f"--max-texts {config.max_texts}; {least:.3f} GiB have"
    )


async def _serve(engine: Engine, model: ServedModel, config: ServeConfig) -> int:
    sys.setswitchinterval(_SWITCH_SECONDS)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        loop.call_soon_threadsafe(ended.set)

    thread = EngineThread(engine, end)
    names = frozenset({"localhost", "127.0.0.1", "::1", config.host})
    limits = ApiLimits(config.max_texts + config.max_waiting_texts, config.request_seconds)
    key = config.read_api_key()
    api = Api(thread, model, limits, api_key=key, local_names=names)
    bounds = HttpLimits(config.max_connections, int(config.max_body_mib * (1 << 20)), config.read_seconds)
    server = HttpServer(api, bounds)
    api.metrics.gauge("connections", "Open connections.", lambda: server.num_connections)
    try:
        port = await server.start(config.host, config.port)
    except OSError as error:
        engine.stop()
        place = f"--host {config.host} --port {config.port}"
        raise UserError(f"{place}: {error.strerror or error}; give another --port, or 0 for a free one") from None
    for number in _SIGNALS:
        loop.add_signal_handler(number, ended.set)
    thread.start()
    host = f"[{config.host}]" if ":" in config.host else config.host
    say(f"serving on http://{host}:{port}" + ("" if key is None else ", for clients with the API key"))
    await ended.wait()
    say("stopping: no new connections, open answers may be finished" if thread.failure is None else "stopping")
    if thread.failure is None:
        await server.drain(config.shutdown_seconds)
    thread.stop()  # tells texts that are not finished
    await asyncio.to_thread(thread.join, 60.0)
    await server.drain(2.0)
    await server.close()
    return 0 if thread.failure is None else 1
