"""A cache for text generation: keys and values in buffers of a fixed size, and states."""

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_inputs import CachedKeyValues


class StaticInferenceContext:
    """The keys and values of rows of different lengths, at most `max_sequence_length` tokens each, and the states of
    layers that have one.

    A model is called first with the prompts, padded on the right, then with one token per row at a time:

        context = StaticInferenceContext(batch_size, max_length)
        positions = context.begin(lengths, prompts.shape[1])
        logits = model(prompts, positions, inference_context=context)  # of each row's next token
        logits = model(next_tokens, context.advance(), inference_context=context)

    Rows do not attend to the padding: it comes after their own tokens and is overwritten as they grow.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self._buffers: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._states: dict[tuple[int, str], Tensor] = {}
        self._last = torch.zeros(0, dtype=torch.int64)
        """Position of the last token of each row, int64 [b]."""
        self._extent = 0
        """Number of positions of the buffers that any row uses."""
        self._first_call = True

    @property
    def extent(self) -> int:
        """Number of positions that any row uses; implements `InferenceContext.extent`."""
        return self._extent

    def begin(self, lengths: Tensor, filled_to: int) -> Tensor:
        """Empties the cache. Prompts of these lengths (int64 [b], each at least 1), padded to `filled_to` tokens, come
        next. Returns their positions, int64 [1, filled_to]."""
        if lengths.shape[0] > self.max_batch_size or filled_to > self.max_sequence_length:
            raise UserError(
                f"{lengths.shape[0]} prompts of up to {filled_to} tokens do not fit into a context of "
                f"{self.max_batch_size} x {self.max_sequence_length}"
            )
        self._last, self._extent, self._first_call = lengths - 1, filled_to, True
        self._states.clear()
        return torch.arange(filled_to, device=lengths.device)[None]

    def advance(self) -> Tensor:
        """Announces one more token per row. Returns its position in each row, int64 [b, 1]."""
        if self._extent == self.max_sequence_length:
            raise UserError(f"the context is full: max_sequence_length {self.max_sequence_length}")
        self._last, self._extent, self._first_call = self._last + 1, self._extent + 1, False
        return self._last[:, None]

    def extend(self, layer_number: int, key: Tensor, value: Tensor, reader: str = "attention") -> CachedKeyValues:
        """Adds keys and values of a layer; implements `InferenceContext.extend`. Raises UserError before `begin`."""
        if not self._last.numel():
            raise UserError(
                "the inference context has no prompts yet: call its begin(lengths, filled_to) before the model, and "
                "advance() before each further token (a script's own sequence_len_offset is not followed)"
            )
        keys, values = self._buffers_of((layer_number, reader), key, value)
        if self._first_call:
            keys[: self._extent], values[: self._extent] = key, value
            return CachedKeyValues(key, value, None)
        rows = torch.arange(key.shape[1], device=key.device)
        keys[self._last, rows], values[self._last, rows] = key[0], value[0]
        return CachedKeyValues(keys[: self._extent], values[: self._extent], self._last[:, None])

    def token_counts(self) -> Tensor:
        """Counts the current tokens of each row; implements `InferenceContext.token_counts`."""
        return self._last + 1 if self._first_call else torch.ones_like(self._last)

    def recall(self, layer_number: int, part: str) -> Tensor | None:
        """Returns a state of a layer; implements `InferenceContext.recall`."""
        return self._states.get((layer_number, part))

    def remember(self, layer_number: int, part: str, state: Tensor) -> None:
        """Keeps a state of a layer; implements `InferenceContext.remember`."""
        self._states[layer_number, part] = state

    def select_last(self, hidden: Tensor) -> Tensor:
        """Selects the last hidden state of each row; implements `InferenceContext.select_last`."""
        if not self._first_call:
            return hidden
        return hidden[self._last, torch.arange(hidden.shape[1], device=hidden.device)][None]

    def _buffers_of(self, owner: tuple[int, str], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the key and value buffers [max_sequence_length, b, g, d] of a part of a layer, for its b rows. They
        are allocated on the first call."""
        if owner not in self._buffers:
            length, rows = self.max_sequence_length, self.max_batch_size
            self._buffers[owner] = (
                key.new_zeros(length, rows, *key.shape[2:]),
                value.new_zeros(length, rows, *value.shape[2:]),
            )
        keys, values = self._buffers[owner]
        return keys[:, : key.shape[1]], values[:, : key.shape[1]]
