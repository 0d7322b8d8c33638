"""Caches for text generation: keys and values in buffers of a fixed size, and the states of recurrent layers."""

import dataclasses

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import CachedKeyValues
from megatron.core.utils.warn import warn_on_first_rank


class StaticInferenceContext:
    """The keys and values of rows of at most `max_sequence_length` tokens each, and the states of layers that have one.

    A script may count the tokens itself, as with Megatron-LM's contexts. The rows of a call are then equally long:

        context = StaticInferenceContext(batch_size, max_length)
        logits = model(tokens, positions, inference_context=context)
        context.sequence_len_offset += tokens.shape[1]

    Or the context counts them; rows may then differ in length. The script calls the model first with the prompts,
    padded on the right, then with one token per row at a time:

        positions = context.begin(lengths, prompts.shape[1])
        logits = model(prompts, positions, inference_context=context)  # of each row's next token
        logits = model(next_tokens, context.advance(), inference_context=context)

    Rows do not attend to the padding: it comes after their own tokens and is overwritten as they grow.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.sequence_len_offset = 0
        """Number of tokens of each row before the current ones. A script that counts the tokens sets it."""
        self.batch_size_offset = 0
        """Index of the first row of the next call. A script that runs the rows in several calls sets it."""
        self.materialize_only_last_token_logits = True
        """Whether the model returns the logits of the last tokens only; without `begin` a script may unset it."""
        self.decode_mode = False
        """Whether the prompts have been read, for scripts; it has no effect here."""
        self._buffers: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._states: dict[tuple[int, str], tuple[Tensor, int, slice]] = {}
        """State, the number of tokens after which it was kept, and its rows."""
        self._lengths = [0] * max_batch_size
        """Number of tokens of each row in the buffers; without `begin` only."""
        self._last: Tensor | None = None
        """Position of the last token of each row, int64 [b]; None: the script counts the tokens."""
        self._extent = 0
        """Number of positions of the buffers that any row uses."""
        self._rows = slice(0, max_batch_size)
        """Rows of the current call."""
        self._positions = torch.zeros(1, 0, dtype=torch.int64)
        """Positions of the current tokens, int64 [1, s]; without `begin` only."""
        self._first_call = True

    @property
    def extent(self) -> int:
        """Number of positions that any row uses; implements `InferenceContext.extent`."""
        return self._extent

    @property
    def gathers_logits(self) -> bool:
        """Whether logits are always gathered; implements `InferenceContext.gathers_logits`."""
        return self._last is not None

    # -----------------------------------------------------------------------------------------------------------------
    # Tokens that the context counts

    def begin(self, lengths: Tensor, filled_to: int) -> Tensor:
        """Empties the cache. The next call must have prompts of these lengths (int64 [b], each at least 1), padded to
        `filled_to` tokens. Returns their positions, int64 [1, filled_to]."""
        if lengths.shape[0] > self.max_batch_size or filled_to > self.max_sequence_length:
            raise UserError(
                f"{lengths.shape[0]} prompts of up to {filled_to} tokens do not fit into a context of "
                f"{self.max_batch_size} x {self.max_sequence_length}"
            )
        self.reset()
        self._last, self._extent, self._rows = lengths - 1, filled_to, slice(0, lengths.shape[0])
        return torch.arange(filled_to, device=lengths.device)[None]

    def advance(self) -> Tensor:
        """Announces one more token per row. Returns its position in each row, int64 [b, 1]."""
        if self._last is None:
            raise UserError(
                "advance() of an inference context without prompts: call begin(lengths, filled_to) first, or add the "
                "number of tokens to sequence_len_offset after each call of the model"
            )
        if self._extent == self.max_sequence_length:
            raise UserError(f"the context is full: max_sequence_length {self.max_sequence_length}")
        self._last, self._extent, self._first_call = self._last + 1, self._extent + 1, False
        return self._last[:, None]

    # -----------------------------------------------------------------------------------------------------------------
    # Tokens that a script counts: Megatron-LM's methods

    def increment_sequence_len_offset(self, increment: int) -> None:
        """Adds to `sequence_len_offset`."""
        self.sequence_len_offset += increment

    def increment_batch_size_offset(self, increment: int) -> None:
        """Adds to `batch_size_offset`."""
        self.batch_size_offset += increment

    def reset_batch_size_offset(self) -> None:
        """Sets `batch_size_offset` to 0."""
        self.batch_size_offset = 0

    def enable_prefill_mode(self) -> None:
        """Unsets `decode_mode`."""
        self.decode_mode = False

    def enable_decode_mode(self) -> None:
        """Sets `decode_mode`."""
        self.decode_mode = True

    def is_decode_only(self) -> bool:
        """Returns `decode_mode`."""
        return self.decode_mode

    def is_static_batching(self) -> bool:
        """Returns True: the buffers have a fixed size."""
        return True

    def is_dynamic_batching(self) -> bool:
        """Returns False."""
        return False

    def reset(self) -> None:
        """Empties the cache, for other rows."""
        self.sequence_len_offset = self.batch_size_offset = self._extent = 0
        self._last, self._first_call, self.decode_mode = None, True, False
        self._lengths = [0] * self.max_batch_size
        self._states.clear()

    @property
    def key_value_memory_dict(self) -> dict[int, tuple[Tensor, Tensor]]:
        """The key and value buffers [max_sequence_length, max_batch_size, g, d] of attention by layer number."""
        return {layer: pair for (layer, reader), pair in self._buffers.items() if reader == "attention"}

    def swap_key_value_dict(self, batch_idx: Tensor) -> None:
        """Replaces row i by row `batch_idx[i]` for all i, as beam search does: int64 [max_batch_size]. Raises UserError
        for another number of rows, for a context that counts the tokens, and for layers with a state."""
        if len(batch_idx) != self.max_batch_size or self._last is not None or self._states:
            raise UserError(
                f"swap_key_value_dict with {len(batch_idx)} rows: it takes max_batch_size {self.max_batch_size} rows, "
                "in a context without begin(), of a model whose layers keep keys and values only"
            )
        self._lengths = [self._lengths[row] for row in batch_idx.tolist()]
        for owner, (keys, values) in self._buffers.items():
            self._buffers[owner] = keys[:, batch_idx], values[:, batch_idx]

    # -----------------------------------------------------------------------------------------------------------------
    # What models and layers call

    def start(self, tokens: Tokens, device: torch.device) -> Tokens:
        """Prepares for a call of the model with these tokens; implements `InferenceContext.start`. Raises UserError if
        they do not fit, or do not follow those in the context."""
        offset, rows, length = self.sequence_len_offset, tokens.batch_size, tokens.seq_length
        if self._last is not None:
            if offset or self.batch_size_offset:
                raise UserError(
                    f"sequence_len_offset {offset}, batch_size_offset {self.batch_size_offset}: begin() and advance() "
                    "count the tokens of this context; leave both at 0, or do not call begin()"
                )
            first = self._positions_of_begun() if tokens.positions is None else tokens.positions
            return dataclasses.replace(tokens, positions=first)
        end = self.batch_size_offset + rows
        if end > self.max_batch_size or offset + length > self.max_sequence_length:
            raise UserError(
                f"{rows} rows from row {self.batch_size_offset} on, of {offset} + {length} tokens, do not fit into an "
                f"inference context of {self.max_batch_size} x {self.max_sequence_length}; make it larger, or reset() "
                "it for other prompts"
            )
        before, self._rows = self._rows, slice(self.batch_size_offset, end)
        held = min(self._lengths[self._rows])
        if offset > held:
            raise UserError(
                f"sequence_len_offset {offset}: the context holds {held} tokens of these rows; add the number of "
                "tokens after each call of the model"
            )
        last = self._positions
        if last.shape[1] not in (0, length) and held and before == self._rows and self._starts_at(offset):
            warn_on_first_rank(
                f"an inference context has sequence_len_offset {offset} in two calls, with {last.shape[1]} and "
                f"{length} tokens: the second replace the first; add the number of tokens after each call of the model"
            )
        self._extent = offset + length
        self._lengths[self._rows] = [self._extent] * rows
        self._positions = torch.arange(offset, self._extent, device=device)[None]
        return dataclasses.replace(tokens, first_position=offset)

    def _starts_at(self, offset: int) -> bool:
        return self._extent - self._positions.shape[1] == offset

    def _positions_of_begun(self) -> Tensor:
        assert self._last is not None
        return torch.arange(self._extent, device=self._last.device)[None] if self._first_call else self._last[:, None]

    def extend(self, layer_number: int, key: Tensor, value: Tensor, reader: str = "attention") -> CachedKeyValues:
        """Adds keys and values of a layer; implements `InferenceContext.extend`."""
        keys, values = self._buffers_of((layer_number, reader), key, value)
        end = self._extent
        if self._last is None:
            start, rows = end - key.shape[0], key.shape[1]
            keys[start:end], values[start:end] = key, value
            if start == 0:
                return CachedKeyValues(key, value, None)
            return CachedKeyValues(keys[:end], values[:end], self._positions.repeat(rows, 1))
        if self._first_call:
            keys[:end], values[:end] = key, value
            return CachedKeyValues(key, value, None)
        each = torch.arange(key.shape[1], device=key.device)
        keys[self._last, each], values[self._last, each] = key[0], value[0]
        return CachedKeyValues(keys[:end], values[:end], self._last[:, None])

    def token_counts(self) -> Tensor:
        """Counts the current tokens of each row; implements `InferenceContext.token_counts`."""
        if self._last is None:
            rows = self._rows.stop - self._rows.start
            return self._positions.new_full((rows,), self._positions.shape[1])
        return self._last + 1 if self._first_call else torch.ones_like(self._last)

    def recall(self, layer_number: int, part: str, *, moves: bool = True) -> Tensor | None:
        """Returns a state of a layer; implements `InferenceContext.recall`."""
        if self._last is None and self.sequence_len_offset == 0:
            return None
        state, end, rows = self._states.get((layer_number, part), (None, 0, self._rows))
        if state is None or self._last is not None:
            return state
        if rows != self._rows or (moves and end != self.sequence_len_offset):
            raise UserError(
                f"an inference context has a state of layer {layer_number} after {end} tokens of the rows {rows.start} "
                f"to {rows.stop - 1}, but the call has sequence_len_offset {self.sequence_len_offset} and the rows "
                f"{self._rows.start} to {self._rows.stop - 1}; a layer with a state must read each token once, in "
                "order, and have the same rows in each call"
            )
        return state

    def remember(self, layer_number: int, part: str, state: Tensor) -> None:
        """Keeps a state of a layer; implements `InferenceContext.remember`."""
        self._states[layer_number, part] = state, self._extent, self._rows

    def select_last(self, hidden: Tensor) -> Tensor:
        """Selects hidden states whose next tokens are predicted; implements `InferenceContext.select_last`."""
        if self._last is None:
            return hidden[-1:] if self.materialize_only_last_token_logits else hidden
        if not self._first_call:
            return hidden
        return hidden[self._last, torch.arange(hidden.shape[1], device=hidden.device)][None]

    def mask_of_call(self, mask: Tensor | None) -> Tensor | None:
        """Returns the mask of the current tokens; implements `InferenceContext.mask_of_call`. Raises UserError for a
        mask of another shape."""
        if mask is None or self._last is not None:
            return mask
        length = self._positions.shape[1]
        sizes = zip(mask.shape[-2:], (length, self._extent), strict=True)
        if mask.dim() != 4 or any(size not in (1, expected) for size, expected in sizes):
            raise UserError(
                f"attention_mask of shape {list(mask.shape)} in a call with an inference context: {length} tokens "
                f"after {self.sequence_len_offset} take [b or 1, heads or 1, {length}, {self._extent}]"
            )
        keys = torch.arange(self._extent, device=mask.device)
        later = keys > self._positions.to(mask.device)[0, :, None]
        return None if bool((mask <= later).all()) else mask

    def _buffers_of(self, owner: tuple[int, str], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the key and value buffers [max_sequence_length, b, g, d] of a part of a layer, for the rows of the
        current call. They are allocated on the first call."""
        if owner not in self._buffers:
            length, rows = self.max_sequence_length, self.max_batch_size
            self._buffers[owner] = (
                key.new_zeros(length, rows, *key.shape[2:]),
                value.new_zeros(length, rows, *value.shape[2:]),
            )
        keys, values = self._buffers[owner]
        return keys[:, self._rows], values[:, self._rows]


class InferenceParams(StaticInferenceContext):
    """Megatron-LM's older name: the model returns the logits of all tokens of a call. See StaticInferenceContext."""

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        super().__init__(max_batch_size, max_sequence_length)
        self.materialize_only_last_token_logits = False
