"""Which parts of a conversation's text are learned: what the assistant writes, without the header of its turns."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.chat_template import ChatTemplate, RenderedText, Span

Message = Mapping[str, Any]
"""A turn of a conversation: `role` (system, user, assistant, ...), `content`, and what else a template reads."""

LEARNED_ROLE = "assistant"
TURN_KINDS = ("answers", "tool calls")
"""Kinds of the assistant's turns, whose losses the log of a run has apart."""
_TAG = "put {% generation %} and {% endgeneration %} around what the assistant writes"


class LearnedTurns:
    """Finds the parts of a text that a chat template makes of a conversation and that are learned.

    They are those inside of {% generation %}, if the template has this tag. Otherwise they are what the template writes
    while its loop over the messages is at an assistant's message, from the end of the turn's header to its end mark.
    The header is the prompt that the template writes for a new turn (`add_generation_prompt`). A turn that does not
    begin with it, or a template without a prompt, has as header what does not depend on the message.

    `special_literals` are the special tokens of the tokenizer: blanks after one that ends a turn are not learned.
    `end_token` is the one that ends a text.
    """

    def __init__(self, template: ChatTemplate, special_literals: Sequence[str], end_token: str) -> None:
        self._template = template
        self._marks = tuple(literal for literal in special_literals if literal)
        self._end_token = end_token
        self._prompts: dict[str, str] = {}

    def find(self, messages: Sequence[Message], variables: Mapping[str, object]) -> tuple[str, list[tuple[Span, int]]]:
        """Returns the text of a conversation and the parts that are learned, in order, each with the index of its kind
        in `TURN_KINDS`. Raises UserError if the template rejects the conversation, or writes the assistant's turns
        where they cannot be told apart."""
        text = self._template.render(messages, variables)
        rendered = self._template.render_with_turns(messages, variables, text)
        calls = [number for number, message in enumerate(messages) if message.get("tool_calls")]
        if self._template.has_generation_tag:
            of_calls = [span for number in calls for span in rendered.turns[number]]
            return text, [
                (span, int(any(_overlap(span, call) for call in of_calls))) for span in sorted(rendered.generated)
            ]
        one = _Conversation(self._template, messages, variables, rendered, self._prompt(variables), self._end_token)
        learned = [at for at, message in enumerate(messages) if message["role"] == LEARNED_ROLE]
        spans = [(self._without_edges(text, span), int(at in calls)) for at in learned for span in one.spans(at)]
        return text, sorted(spans)

    def _without_edges(self, text: str, span: Span) -> Span:
        """Leaves out blanks after the mark that ends a turn, and takes in a mark that only the next turn writes."""
        begin, end = span
        written = text[begin:end].rstrip()
        if written.endswith(self._marks):
            return begin, begin + len(written)
        following = text[end:].lstrip()
        if self._end_token and following.startswith(self._end_token):
            return begin, len(text) - len(following) + len(self._end_token)
        return span

    def _prompt(self, variables: Mapping[str, object]) -> str:
        """Returns what the template writes to ask for a turn of the assistant; empty if it writes nothing."""
        settings = {name: value for name, value in variables.items() if name not in ("tools", "documents")}
        key = json.dumps(settings, sort_keys=True)
        if key not in self._prompts:
            if len(self._prompts) > 1000:
                self._prompts.clear()
            self._prompts[key] = self._make_prompt(settings)
        return self._prompts[key]

    def _make_prompt(self, settings: Mapping[str, object]) -> str:
        question = [{"role": "user", "content": "?"}]
        try:
            without = self._template.render(question, settings)
            asking = {**settings, "add_generation_prompt": True}
            text = self._template.render(question, asking)
            if text.startswith(without):
                return text[len(without) :]
            turn = self._template.render_with_turns(question, asking, text).turns[0]
        except UserError:  # a template that wants another beginning
            return ""
        end = turn[-1][1] if turn else 0  # something else is at the end of a text without a prompt
        return text[end:] if turn and without[:end] == text[:end] else ""


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _common_begin(one: str, other: str) -> str:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in pairs)


class _Conversation:
    """A conversation whose text has been made, and the places of its turns."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        rendered: RenderedText,
        prompt: str,
        end_token: str,
    ) -> None:
        self._template, self._messages, self._variables = template, messages, variables
        self._rendered, self._prompt, self._end_token = rendered, prompt, end_token
        used = set(rendered.text)
        self._probe = next(mark for mark in map(chr, range(0xF000, 0xF900)) if mark not in used)
        self._all_changed: RenderedText | None = None

    def spans(self, at: int) -> list[Span]:
        """Returns the parts of the text that message `at` wrote, without the turn's header."""
        text = self._rendered.text
        parts = [span for span in self._rendered.turns[at] if text[slice(*span)].strip()]
        if not parts:
            return self._span_by_prefix(at)
        begin, end = parts[-1]
        if at == len(self._messages) - 1 and self._end_token and text[end:].strip() == self._end_token:
            parts[-1] = begin, len(text)  # written after the loop
        found = []
        for number, (begin, end) in enumerate(parts):
            header = self._header(text[begin:end], at, partial(self._changed_part, at, number))
            found.append((begin + header, end))
        return found

    def _header(self, part: str, at: int, changed_part: Callable[[], str | None]) -> int:
        """Returns the length of the header at the begin of a part."""
        asked = self._prompt.strip()
        blanks = len(part) - len(part.lstrip())
        if asked and part.startswith(asked, blanks):
            length = blanks + len(asked)
            after = self._prompt[len(self._prompt.rstrip()) :]
            return length + len(_common_begin(after, part[length:]))
        changed = changed_part()
        if changed is None:
            raise UserError(f"the chat template does not show where the header of turn {at + 1} ends; {_TAG}")
        # A blank goes with the word after it: many tokenizers have one token for both.
        return len(_common_begin(part, changed).rstrip(" "))

    def _changed_part(self, at: int, number: int) -> str | None:
        """Returns the part of a turn if its message had another content; None if the template rejects this."""
        other = {"role": LEARNED_ROLE, "content": self._probe}
        if self._all_changed is None:
            self._all_changed = self._render(
                [other if message["role"] == LEARNED_ROLE else message for message in self._messages]
            )
        for rendered in (self._all_changed, self._render([*self._messages[:at], other])):
            if rendered is not None:
                parts = [rendered.text[slice(*span)] for span in rendered.turns[at]]
                parts = [part for part in parts if part.strip()]
                if number < len(parts):
                    return parts[number]
        return None

    def _render(self, messages: Sequence[Message]) -> RenderedText | None:
        try:
            text = self._template.render(messages, self._variables)
            return self._template.render_with_turns(messages, self._variables, text)
        except UserError:
            return None

    def _span_by_prefix(self, at: int) -> list[Span]:
        """Returns the part of a turn that was not written by a loop over the messages: what the message adds to the
        text of those before it. Empty if the template leaves the message out."""
        text = self._rendered.text
        other = {"role": LEARNED_ROLE, "content": self._probe}
        changed = self._render([*self._messages[:at], other, *self._messages[at + 1 :]])
        if changed is not None and changed.text == text:
            return []
        before, after, changed = (
            self._render(list(part))
            for part in (self._messages[:at], self._messages[: at + 1], [*self._messages[:at], other])
        )
        start = before.text if before is not None and at else ""
        if after is None or not (after.text.startswith(start) and text.startswith(after.text)):
            raise UserError(
                f"the chat template does not write turn {at + 1} in a loop over the messages, so the run cannot tell "
                f"which tokens are the assistant's; {_TAG}"
            )
        probe = None if changed is None else changed.text[len(start) :]
        begin = len(start) + self._header(after.text[len(start) :], at, lambda: probe)
        return [(begin, len(after.text))]
