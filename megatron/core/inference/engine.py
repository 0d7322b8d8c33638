"""Continuous batching (Yu et al. 2022, Orca): texts that begin and end at any time are written together.

Each step computes the prompts of new texts, at most `prefill_tokens` tokens, and then one token of every other text. If
the pages do not suffice, the text that began last gives its own back and is computed again later; its tokens stay.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.inference.call_channel import Call, CallChannel, CallKind, make_call
from megatron.core.inference.decoding_graphs import DecodingGraphs
from megatron.core.inference.device_copies import to_device
from megatron.core.inference.layout_forward import LayoutForward
from megatron.core.inference.paged_context import PagedInferenceContext, RowPart
from megatron.core.inference.sampling import TextSoFar, next_tokens

Finish = Literal["stop", "length", "error"]

_LOGITS_AT_ONCE = 256
"""Tokens of a call whose logits are all needed."""


@dataclass(frozen=True)
class ScoredToken:
    """A token and its log-probability, given the tokens before it, without temperature, cuts and penalties."""

    token: int
    logprob: float | None = None
    """None: not asked for, or the first token of a prompt."""
    likeliest: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this position and their log-probabilities, as many as were asked for."""


@dataclass(frozen=True)
class Progress:
    """What the engine tells about a text after a step."""

    token: ScoredToken | None = None
    """The new token; None: none was added (an end token is none)."""
    prompt: tuple[ScoredToken, ...] = ()
    """The scored tokens of the prompt, once, if they were asked for."""
    finish: Finish | None = None
    """Why the text has ended; None: it goes on."""
    error: str = ""
    """Why it could not be finished."""


@dataclass(eq=False)
class TextRequest:
    """A text to write."""

    text: TextSoFar
    """The prompt, at least one token, and how to choose tokens."""
    max_new_tokens: int
    tell: Callable[[Progress], None]
    """Is called from the engine's thread after each step that concerns the text."""
    num_logprobs: int | None = None
    """Number of likeliest tokens to tell at each position; None: tell no log-probabilities."""
    scores_prompt: bool = False
    """Whether to tell the log-probabilities of the prompt, too."""


@dataclass(eq=False)
class _Row:
    """A text that the engine knows."""

    request: TextRequest
    ids: list[int]
    """Prompt and written tokens."""
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    """Number of tokens whose keys and values are in the cache."""
    scored: list[ScoredToken] = field(default_factory=list)
    prompt_is_told: bool = False

    @property
    def scores_prompt(self) -> bool:
        return self.request.scores_prompt and not self.prompt_is_told


class Engine:
    """Writes texts on the first rank of a layout; the other ranks run `follow`. One thread calls `step`; `submit` and
    `cancel` may be called from other threads."""

    def __init__(
        self,
        forward: LayoutForward,
        context: PagedInferenceContext,
        channel: CallChannel,
        *,
        prefill_tokens: int = 2048,
        graphs: DecodingGraphs | None = None,
    ) -> None:
        """`graphs` compute the steps of a model on a single rank, where they can."""
        self.forward, self.context, self.channel, self.graphs = forward, context, channel, graphs
        self.prefill_tokens = prefill_tokens
        self._lock = threading.Lock()
        self._inbox: deque[tuple[Literal["submit", "cancel"], TextRequest]] = deque()
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        """In the order in which they began."""
        self._free_pages = list(range(context.num_pages - 1, 0, -1))
        self._free_slots = list(range(context.num_slots - 1, -1, -1))

    # -----------------------------------------------------------------------------------------------------------------
    # For other threads

    def submit(self, request: TextRequest) -> None:
        """Adds a text. Raises UserError if it can never fit."""
        total = len(request.text.prompt) + request.max_new_tokens
        most = min(self.context.max_sequence_length, (self.context.num_pages - 1) * self.context.page_size)
        if total > most:
            raise UserError(f"{total} tokens of prompt and text, but there is room for {most}")
        assert request.text.prompt, "a prompt has at least one token"
        with self._lock:
            self._inbox.append(("submit", request))

    def cancel(self, request: TextRequest) -> None:
        """Ends a text without telling it. A text that has ended already is left alone."""
        with self._lock:
            self._inbox.append(("cancel", request))

    @property
    def num_running(self) -> int:
        """Number of texts that have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of texts that wait for a slot or for pages."""
        return len(self._waiting) + len(self._inbox)

    @property
    def num_used_pages(self) -> int:
        """Number of pages that texts have."""
        return self.context.num_pages - 1 - len(self._free_pages)

    # -----------------------------------------------------------------------------------------------------------------
    # For the engine's thread

    @property
    def has_work(self) -> bool:
        """Whether any text is to be written."""
        return bool(self._inbox or self._waiting or self._running)

    def step(self) -> None:
        """Adds a token to each text that can run."""
        self._read_inbox()
        self._admit()
        new = self._rows_to_prefill()
        if new:
            self._compute(new)
        begun = {id(row) for row, _ in new}
        growing = self._with_pages([row for row in self._running if id(row) not in begun and self._is_decoding(row)])
        if growing:
            self._compute([(row, 1) for row in growing], decodes=True)

    def fail(self, why: str) -> None:
        """Ends all texts with an error."""
        self._read_inbox()
        for row in [*self._running, *self._waiting]:
            self._end(row)
            row.request.tell(Progress(finish="error", error=why))
        self._waiting.clear()

    def idle(self) -> None:
        """Tells the other ranks that nothing is to do."""
        self.channel.send(Call(CallKind.IDLE))

    def stop(self) -> None:
        """Lets the other ranks return from `follow`."""
        self.channel.send(Call(CallKind.STOP))

    def _read_inbox(self) -> None:
        with self._lock:
            messages = list(self._inbox)
            self._inbox.clear()
        for kind, request in messages:
            if kind == "submit":
                self._waiting.append(_Row(request, [*request.text.prompt, *request.text.written]))
                continue
            for row in [row for row in self._running if row.request is request]:
                self._end(row)
            self._waiting = deque(row for row in self._waiting if row.request is not request)

    def _admit(self) -> None:
        """Gives slots and pages to texts that wait, in their order."""
        while self._waiting and self._free_slots:
            row = self._waiting[0]
            needed = self._pages_for(len(row.ids) + 1)
            if needed > len(self._free_pages):
                return
            self._waiting.popleft()
            row.slot, row.cached = self._free_slots.pop(), 0
            row.pages = [self._free_pages.pop() for _ in range(needed)]
            self._running.append(row)

    def _pages_for(self, tokens: int) -> int:
        tokens = min(tokens, self.context.max_sequence_length)
        return min(-(-tokens // self.context.page_size), self.context.num_pages - 1)

    @staticmethod
    def _is_decoding(row: _Row) -> bool:
        return row.cached > 0 and row.cached == len(row.ids) - 1 and not row.scores_prompt

    def _rows_to_prefill(self) -> list[tuple[_Row, int]]:
        """Returns rows whose prompts are to be computed, and the number of tokens of each. A row whose prompt is scored
        comes alone."""
        found: list[tuple[_Row, int]] = []
        widest = 0
        for row in self._running:
            if self._is_decoding(row):
                continue
            left = len(row.ids) - row.cached
            if row.scores_prompt:
                return found or [(row, min(left, _LOGITS_AT_ONCE, self.prefill_tokens))]
            widest = max(widest, min(left, self.prefill_tokens))
            if widest * (len(found) + 1) > self.prefill_tokens and found:
                break
            found.append((row, min(left, self.prefill_tokens)))
        return found

    def _with_pages(self, rows: list[_Row]) -> list[_Row]:
        """Returns the rows that have a page for one more token. Rows that began last give theirs back if there are too
        few."""
        for row in rows:
            while row.slot >= 0 and len(row.pages) * self.context.page_size <= row.cached:
                if self._free_pages:
                    row.pages.append(self._free_pages.pop())
                else:
                    last = self._running[-1]
                    self._end(last)
                    self._waiting.appendleft(last)
        return [row for row in rows if row.slot >= 0]

    def _end(self, row: _Row, *, clears: bool = False) -> None:
        """Takes slot and pages of a row, if it has any."""
        if row.slot < 0:
            return
        if clears:
            call = Call(CallKind.CLEAR_PAGES, pages=tuple(row.pages))
            self.channel.send(call)
            make_call(self.forward, self.context, call)
        self._free_pages += reversed(row.pages)
        self._free_slots.append(row.slot)
        row.slot, row.pages = -1, []
        self._running.remove(row)

    def _compute(self, parts: Sequence[tuple[_Row, int]], *, decodes: bool = False) -> None:
        """Computes some tokens of rows, and chooses the next token of rows that are complete. `decodes`: it is the
        newest token of each row."""
        scores = parts[0][0].scores_prompt
        rows = tuple(
            RowPart(row.slot, row.cached, tuple(row.ids[row.cached : row.cached + count]), tuple(row.pages))
            for row, count in parts
        )
        last = self.graphs.logits_of(rows) if decodes and self.graphs is not None else None  # [b, V]
        if last is None:
            call = Call(CallKind.FORWARD_ALL_LOGITS if scores else CallKind.FORWARD, rows)
            self.channel.send(call)
            logits = make_call(self.forward, self.context, call)
            assert logits is not None
            if scores:
                self._score(parts[0][0], logits[0])
            last = logits[:, -1]
        for row, count in parts:
            row.cached += count
        complete = [number for number, (row, _) in enumerate(parts) if row.cached == len(row.ids)]
        if len(complete) < len(parts):
            last = last.index_select(0, to_device(torch.tensor(complete, dtype=torch.long), last.device))
        if complete:
            self._choose([parts[number][0] for number in complete], last)

    def _score(self, row: _Row, logits: Tensor) -> None:
        """Notes the log-probabilities of the tokens after those with these logits, [s, V], as far as they are known."""
        following = row.ids[row.cached + 1 : row.cached + 1 + logits.shape[0]]
        if not row.cached:
            row.scored = [ScoredToken(row.ids[0])]
        row.scored += scored_tokens(logits[: len(following)], following, row.request.num_logprobs)

    def _choose(self, rows: Sequence[_Row], logits: Tensor) -> None:
        """Adds a token to rows whose last logits are these, [b, V]."""
        tokens = next_tokens(logits, [row.request.text for row in rows])
        # The only wait for the device in a step without log-probabilities. -1: a logit is NaN.
        chosen = tokens.masked_fill(logits.isnan().any(-1), -1).tolist()
        asked = [row.request.num_logprobs for row in rows]
        existing = [max(token, 0) for token in chosen]
        scored = _scored_rows(logits, existing, asked) if any(n is not None for n in asked) else None
        for number, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            if token < 0:
                self._end(row, clears=True)
                row.request.tell(Progress(finish="error", error="the model's logits are not numbers (NaN)"))
                continue
            known = ScoredToken(token) if scored is None or asked[number] is None else scored[number]
            self._add(row, known)

    def _add(self, row: _Row, new: ScoredToken) -> None:
        text, prompt = row.request.text, tuple(row.scored) if row.scores_prompt else ()
        row.prompt_is_told, row.scored = True, []
        finish: Finish | None = None
        token: ScoredToken | None = new
        if not row.request.max_new_tokens:
            token, finish = None, "length"
        elif new.token in text.ends:
            token, finish = None, "stop"
        else:
            row.ids.append(new.token)
            text.written.append(new.token)
            finish = "length" if len(text.written) == row.request.max_new_tokens else None
        if finish:
            self._end(row)
        row.request.tell(Progress(token, prompt, finish))


def _scored_rows(logits: Tensor, chosen: Sequence[int], asked: Sequence[int | None]) -> list[ScoredToken]:
    most = max(number or 0 for number in asked)
    found = scored_tokens(logits, chosen, most)
    return [
        ScoredToken(token.token, token.logprob, token.likeliest[: number or 0])
        for token, number in zip(found, asked, strict=True)
    ]


def scored_tokens(logits: Tensor, tokens: Sequence[int], num_likeliest: int | None) -> list[ScoredToken]:
    """Returns tokens with their log-probabilities, for the logits [n, V] that predict them."""
    if not len(tokens):
        return []
    logs = logits.log_softmax(-1)
    own = logs.gather(-1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].tolist()
    values, indices = logs.topk(min(num_likeliest or 0, logs.shape[-1]), -1)
    pairs = zip(indices.tolist(), values.tolist(), strict=True)
    return [
        ScoredToken(token, logprob, tuple(zip(ids, logprobs, strict=True)))
        for token, logprob, (ids, logprobs) in zip(tokens, own, pairs, strict=True)
    ]
