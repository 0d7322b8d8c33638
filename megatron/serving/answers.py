"""The texts of a request as they are written, and OpenAI's objects for them."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from megatron.core.inference.engine import ScoredToken
from megatron.core.inference.sampling import TextSoFar
from megatron.data.tokenizer.base import Tokenizer
from megatron.serving.engine_thread import EngineThread
from megatron.serving.http_server import HttpError
from megatron.serving.openai_requests import Prompt, WritingRequest
from megatron.serving.text_stream import TextStream

Json = dict[str, object]


@dataclass(frozen=True)
class PlacedToken:
    """A token, and where its text begins."""

    scored: ScoredToken
    offset: int


@dataclass(frozen=True)
class Piece:
    """A part of the text of one choice."""

    choice: int
    text: str
    tokens: tuple[PlacedToken, ...] = ()
    """Tokens that belong to the text, if log-probabilities were asked for."""
    finish: str | None = None
    count: int = 0
    """Tokens of the text that have been written since the piece before."""


@dataclass
class WrittenText:
    """A whole choice."""

    text: str = ""
    tokens: list[PlacedToken] = field(default_factory=list)
    finish: str = "length"
    count: int = 0

    def add(self, piece: Piece) -> None:
        """Appends a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.count += piece.count
        self.finish = piece.finish or self.finish


async def write_choice(
    thread: EngineThread,
    tokenizer: Tokenizer,
    request: WritingRequest,
    prompt: Prompt,
    choice: int,
    new_tokens: int,
    ends: Sequence[int],
) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of one text. Raises HttpError if it cannot be finished."""
    scores = request.num_logprobs is not None
    text = TextSoFar(request.sampling, prompt.ids, [], () if request.ignores_ends else ends, choice)
    stream = TextStream(tokenizer, prompt.ids if prompt.text is None or prompt.text else (), request.stops)
    before = 0
    if request.echo:
        shown = tokenizer.detokenize(prompt.ids) if prompt.text is None else prompt.text
        before = len(shown)
        if not scores:
            yield Piece(choice, shown)
    waiting: list[PlacedToken] = []
    writing = thread.write(text, new_tokens, request.num_logprobs, scores and request.echo)
    async with contextlib.aclosing(writing) as steps:
        async for step in steps:
            if step.finish == "error":
                raise HttpError(503, step.error, kind="server_error")
            if step.prompt:
                yield Piece(choice, shown, _prompt_tokens(tokenizer, step.prompt))
            piece = ""
            if step.token is not None:
                if scores:
                    waiting.append(PlacedToken(step.token, before + stream.length))
                piece = stream.add(step.token.token)
            finish = step.finish
            if finish is not None and not stream.stopped:
                piece += stream.finish()
            if stream.stopped:
                finish = "stop"
                waiting = [token for token in waiting if token.offset < before + stream.length]
            if piece or finish or step.token is not None:
                held, waiting = (tuple(waiting), []) if piece or finish else ((), waiting)
                yield Piece(choice, piece, held, finish, int(step.token is not None))
            if finish:
                return


def _prompt_tokens(tokenizer: Tokenizer, prompt: Sequence[ScoredToken]) -> tuple[PlacedToken, ...]:
    stream, placed = TextStream(tokenizer), []
    for token in prompt:
        placed.append(PlacedToken(token, stream.length))
        stream.add(token.token)
    return tuple(placed)


async def merged(writings: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of several choices as they come. If one fails, all end."""
    if len(writings) == 1:
        async with contextlib.aclosing(writings[0]) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def read(writing: AsyncGenerator[Piece, None]) -> None:
        try:
            async with contextlib.aclosing(writing) as pieces:
                async for piece in pieces:
                    queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    readers = [asyncio.ensure_future(read(writing)) for writing in writings]
    left = len(readers)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= item is None
            if item is not None:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


# ---------------------------------------------------------------------------------------------------------------------
# OpenAI's objects


class Form:
    """The objects of one answer, of /v1/completions or (`chat`) of /v1/chat/completions."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, chat: bool, scores: bool) -> None:
        self.chat, self.scores, self._tokenizer = chat, scores, tokenizer
        name = "chatcmpl" if chat else "cmpl"
        self._head: Json = {"id": f"{name}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, texts: Sequence[WrittenText], prompt_tokens: int) -> Json:
        """Returns the object of an answer that is no stream."""
        choices = [self._choice(number, text) for number, text in enumerate(texts)]
        usage = usage_of(prompt_tokens, sum(text.count for text in texts))
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def _choice(self, number: int, text: WrittenText) -> Json:
        shown: Json = {"message": {"role": "assistant", "content": text.text}} if self.chat else {"text": text.text}
        return {"index": number, **shown, "logprobs": self._logprobs(text.tokens), "finish_reason": text.finish}

    def part(self, piece: Piece, *, begins: bool = False) -> Json:
        """Returns the object of one part of a stream."""
        delta: Json = {"role": "assistant"} if begins else {}
        delta |= {"content": piece.text} if piece.text or begins else {}
        shown: Json = {"delta": delta} if self.chat else {"text": piece.text}
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        return self.of_choices([{"index": piece.choice, **shown, "logprobs": logprobs, "finish_reason": piece.finish}])

    def of_choices(self, choices: list[Json]) -> Json:
        """Returns the object of a part of a stream with these choices."""
        return {**self._head, "object": "chat.completion.chunk" if self.chat else "text_completion", "choices": choices}

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        if not self.scores:
            return None
        if self.chat:
            return {"content": [self._of_chat(token.scored) for token in tokens]}
        return {
            "tokens": [self._text(token.scored.token) for token in tokens],
            "token_logprobs": [token.scored.logprob for token in tokens],
            "top_logprobs": [
                None if token.scored.logprob is None else {self._text(i): value for i, value in token.scored.likeliest}
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def _of_chat(self, token: ScoredToken) -> Json:
        best = [self._scored(number, logprob) for number, logprob in token.likeliest]
        return {**self._scored(token.token, token.logprob), "top_logprobs": best}

    def _scored(self, token: int, logprob: float | None) -> Json:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _text(self, token: int) -> str:
        return self._tokenizer.detokenize([token])


def usage_of(prompt_tokens: int, completion_tokens: int) -> Json:
    """Returns the object of the numbers of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
