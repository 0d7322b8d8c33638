"""A cache for text generation whose rows begin and end at different times: keys and values in pages, states in slots.

A row has a slot for as long as its text is written, and a list of pages, each with the keys and values of `page_size`
tokens. Rows of any lengths share one pool of pages, so that a short row takes little memory (Kwon et al. 2023,
arXiv:2309.06180).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.inference.device_copies import to_device
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import CachedKeyValues


@dataclass(frozen=True)
class RowPart:
    """The tokens of one row in a call of the model."""

    slot: int
    """Slot of the row."""
    start: int
    """Number of tokens of the row in the cache."""
    tokens: tuple[int, ...]
    """The tokens after these."""
    pages: tuple[int, ...]
    """Pages of the row, enough for all these tokens."""


_FIRST_TOKEN = 3


def row_numbers(rows: Sequence[RowPart], width: int, num_pages: int) -> Tensor:
    """Returns all numbers of rows as one tensor, which takes a single copy to the device: int64 [b, 3 + width +
    num_pages], for each row its slot, start, number of tokens, tokens and pages, filled up with zeros."""
    numbers: list[list[int]] = []
    for row in rows:
        count, pages = len(row.tokens), row.pages[:num_pages]
        padding, missing = [0] * (width - count), [0] * (num_pages - len(pages))
        numbers.append([row.slot, row.start, count, *row.tokens, *padding, *pages, *missing])
    return torch.tensor(numbers)


class PagedInferenceContext:
    """The pool of pages and slots of one rank; implements `InferenceContext`.

    A call begins with `begin(rows)`, which returns the tokens and positions for the model. Page 0 belongs to no row: it
    stands for keys beyond the end of a row, which are never attended to.
    """

    gathers_logits = True

    def __init__(self, num_pages: int, page_size: int, num_slots: int, max_sequence_length: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.num_slots, self.max_sequence_length = num_slots, max_sequence_length
        self._pools: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        """Keys and values [num_pages * page_size, g, d] of a part of a layer."""
        self._states: dict[tuple[int, str], Tensor] = {}
        """A state of a layer, [slots, ...]."""
        self._all_logits = False
        self._real: Tensor | None = None
        """Indices among all s * b tokens of those that are no padding; None: all."""

    # -----------------------------------------------------------------------------------------------------------------
    # What the engine calls

    def begin(
        self, rows: Sequence[RowPart], device: torch.device, *, all_logits: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Prepares for a call of the model with these rows. Returns tokens and positions, int64 [b, s]; shorter rows
        are padded on the right. `all_logits`: the successors of all tokens are predicted, not only of each row's
        last."""
        width, extent = max(len(row.tokens) for row in rows), max(row.start + len(row.tokens) for row in rows)
        assert extent <= self.max_sequence_length
        self._all_logits = all_logits
        self._is_first = not any(row.start for row in rows)
        self._real = None
        if any(len(row.tokens) < width for row in rows):
            real = [
                step * len(rows) + n for step in range(width) for n, row in enumerate(rows) if step < len(row.tokens)
            ]
            self._real = to_device(torch.tensor(real), device)
        numbers = row_numbers(rows, width, -(-extent // self.page_size))
        return self._prepare(to_device(numbers, device), width, extent)

    def begin_decoding(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Prepares for one token of each row, like `begin`, for the `row_numbers` of rows with earlier tokens, on the
        device. The host reads no number, so that the call can be captured as a graph."""
        self._all_logits, self._is_first, self._real = False, False, None
        pages = numbers.shape[1] - _FIRST_TOKEN - 1
        return self._prepare(numbers, 1, min(pages * self.page_size, self.max_sequence_length))

    def _prepare(self, numbers: Tensor, width: int, extent: int) -> tuple[Tensor, Tensor]:
        self._extent, device = extent, numbers.device
        self._slots, self._starts, self._counts = numbers[:, :_FIRST_TOKEN].unbind(1)
        tokens, pages = numbers[:, _FIRST_TOKEN:].split([width, numbers.shape[1] - _FIRST_TOKEN - width], 1)
        places = (pages[..., None] * self.page_size + torch.arange(self.page_size, device=device)).flatten(1)
        places = places[:, :extent].t().contiguous()  # of each position of each row, [extent, b]
        self._places = places.flatten()
        """Place in the pools of each position of each row, int64 [extent * b]."""
        steps = torch.arange(width, device=device)
        self._positions = (self._starts[:, None] + steps).clamp(max=extent - 1)
        """int64 [b, s]; meaningless for padding, but positions of the model."""
        written = places.gather(0, self._positions.t()).flatten()
        self._written = written if self._real is None else written[self._real]
        """Places of the current tokens that are no padding."""
        self.padding = steps >= self._counts[:, None]
        """Which of the current tokens are padding: bool [b, s]."""
        return tokens, self._positions

    @property
    def bytes_per_token(self) -> int:
        """Memory of a token in the pools; 0 before the first call."""
        pools = [tensor for pair in self._pools.values() for tensor in pair]
        return sum(pool[0].numel() * pool.element_size() for pool in pools)

    @property
    def bytes_per_slot(self) -> int:
        """Memory of the states of a row; 0 before the first call."""
        return sum(state[0].numel() * state.element_size() for state in self._states.values())

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Writes zeros over pages. Values that are no numbers would otherwise reach the next row that gets the pages:
        0 * NaN is NaN."""
        size = torch.arange(self.page_size)
        places = (torch.tensor(pages)[:, None] * self.page_size + size).flatten()
        for keys, values in self._pools.values():
            keys[places.to(keys.device)] = 0
            values[places.to(values.device)] = 0

    # -----------------------------------------------------------------------------------------------------------------
    # What models and layers call

    @property
    def extent(self) -> int:
        """Number of positions that any row uses; implements `InferenceContext.extent`."""
        return self._extent

    def start(self, tokens: Tokens, device: torch.device) -> Tokens:
        """Returns the tokens with their positions; implements `InferenceContext.start`."""
        return dataclasses.replace(tokens, positions=self._positions)

    def mask_of_call(self, mask: Tensor | None) -> Tensor | None:
        """Accepts no mask; implements `InferenceContext.mask_of_call`."""
        if mask is not None:
            raise UserError("attention_mask with a PagedInferenceContext: rows see their own tokens only; leave it out")
        return None

    def extend(self, layer_number: int, key: Tensor, value: Tensor, reader: str = "attention") -> CachedKeyValues:
        """Adds keys and values of a layer; implements `InferenceContext.extend`."""
        keys, values = self._pool_of((layer_number, reader), key, value)
        for pool, new in ((keys, key), (values, value)):
            flat = new.flatten(0, 1)
            pool.index_copy_(0, self._written, flat if self._real is None else flat[self._real])
        if self._is_first:
            return CachedKeyValues(key, value, None)
        shape = self._extent, key.shape[1]
        keys, values = (pool.index_select(0, self._places).unflatten(0, shape) for pool in (keys, values))
        return CachedKeyValues(keys, values, self._positions)

    def token_counts(self) -> Tensor:
        """Counts the current tokens of each row; implements `InferenceContext.token_counts`."""
        return self._counts

    def recall(self, layer_number: int, part: str, *, moves: bool = True) -> Tensor | None:
        """Returns a state of a layer, [b, ...], zero for rows that begin; implements `InferenceContext.recall`."""
        pool = self._states.get((layer_number, part))
        if pool is None or self._is_first:
            return None
        begins = (self._starts == 0).view(-1, *[1] * (pool.dim() - 1))
        return pool[self._slots].masked_fill(begins, 0)

    def remember(self, layer_number: int, part: str, state: Tensor) -> None:
        """Keeps a state of a layer, [b, ...]; implements `InferenceContext.remember`."""
        if (layer_number, part) not in self._states:
            self._states[layer_number, part] = state.new_zeros(self.num_slots, *state.shape[1:])
        self._states[layer_number, part][self._slots] = state

    def select_last(self, hidden: Tensor) -> Tensor:
        """Selects hidden states whose next tokens are predicted; implements `InferenceContext.select_last`."""
        if self._all_logits:
            return hidden
        if hidden.shape[0] == 1:
            return hidden
        return hidden[self._counts - 1, torch.arange(hidden.shape[1], device=hidden.device)][None]

    def _pool_of(self, owner: tuple[int, str], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the pools of a part of a layer, which are allocated on its first call."""
        if owner not in self._pools:
            places = self.num_pages * self.page_size
            self._pools[owner] = (
                key.new_zeros(places, *key.shape[2:]),
                value.new_zeros(places, *value.shape[2:]),
            )
        return self._pools[owner]
