"""The text of tokens that arrive one by one: characters of several tokens, and strings that end the text."""

from collections.abc import Sequence

from megatron.data.tokenizer.base import Tokenizer

_CUT = "\ufffd"
"""Stands for bytes that are no character, so also for the first bytes of one."""
_WINDOW = 16
"""Tokens that are decoded again with each new token: the text of a token may depend on those before it."""
_PROMPT_TAIL = 8


class TextStream:
    """Turns tokens into pieces of text that join to the text of all tokens.

    A piece ends before a character whose bytes are not complete, and before a text that may be the beginning of one of
    `stops`. `prompt` are the tokens before, whose last ones decide whether a blank comes first.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._window = list(prompt[-_PROMPT_TAIL:])
        self._shown = _complete(tokenizer.detokenize(self._window)) if self._window else 0
        """Number of characters of the window's text that are in `_held` or were returned."""
        self._held = ""
        """Text that is not returned yet."""
        self._returned = 0
        self.stopped = False
        """Whether one of `stops` has come. It is not part of the text, and nothing after it is."""

    @property
    def length(self) -> int:
        """Number of characters so far, those included that are held back."""
        return self._returned + len(self._held)

    def add(self, token: int) -> str:
        """Returns the text that one more token completes; it may be empty."""
        if self.stopped:
            return ""
        self._window.append(token)
        text = self._tokenizer.detokenize(self._window)
        complete = _complete(text)
        if complete > self._shown:
            self._held += text[self._shown : complete]
            self._shown = complete
        if len(self._window) > 2 * _WINDOW and complete == len(text):
            self._window = self._window[-_WINDOW:]
            self._shown = len(self._tokenizer.detokenize(self._window))
        return self._release(self._kept_back())

    def finish(self) -> str:
        """Returns the rest of the text after the last token."""
        if not self.stopped:
            self._held += self._tokenizer.detokenize(self._window)[self._shown :] if self._window else ""
            self._window = []
        return self._release(0)

    def _release(self, kept: int) -> str:
        """Returns the text that is held, except its last `kept` characters, or up to a stop string."""
        found = min(((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped, kept = True, 0
            self._held = self._held[: found[0]]
        cut = len(self._held) - kept
        piece, self._held = self._held[:cut], self._held[cut:]
        self._returned += len(piece)
        return piece

    def _kept_back(self) -> int:
        """Returns how many of the last characters may begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[len(self._held) - count :]
            if any(stop.startswith(tail) for stop in self._stops):
                return count
        return 0


def _complete(text: str) -> int:
    """Returns the number of characters before one whose bytes are not complete."""
    return len(text) - text.endswith(_CUT)
