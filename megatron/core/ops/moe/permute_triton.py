"""Permutation of tokens on a GPU: copies and sums in one pass each, and the rows of copies by counting."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.fp8.quantize import note_largest
from megatron.core.ops.fp8.quantize_triton import bits_of_size
from megatron.core.ops.moe.permute import ChoiceNumbers, Copies, Moves, permute, unpermute
from megatron.core.ops.tiles import cdiv, next_power_of_2

_TILE = 2048
"""Elements that one program moves."""
_CHOICES = 256
"""Choices whose rows one program finds."""
_GROUPS = 32
"""Groups whose choices are counted at once."""


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    rows, largest, tokens, source, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NOTES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(source + row, mask=row < count, other=0).to(tl.int64)
    inside = (row < count)[:, None] & (column < width)[None, :]
    value = tl.load(tokens + token[:, None] * width + column[None, :], mask=inside)
    tl.store(rows + row[:, None] * width + column[None, :], value, mask=inside)
    if NOTES:
        size = bits_of_size(tl.where(inside, value.to(tl.float32), 0.0))
        tl.atomic_max(largest + row, tl.max(size, 1), mask=row < count)


@triton.jit
def _spread_kernel(  # type: ignore[no-untyped-def]
    rows, tokens, places, count, width, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (token < count)[:, None] & (column < width)[None, :]
    value = tl.load(tokens + token[:, None] * width + column[None, :], mask=valid)
    for j in range(K):
        place = tl.load(places + token * K + j, mask=token < count, other=-1).to(tl.int64)
        copied = valid & (place >= 0)[:, None]
        tl.store(rows + place[:, None] * width + column[None, :], value, mask=copied)


@triton.jit
def _tokens_kernel(  # type: ignore[no-untyped-def]
    tokens, rows, places, count, width, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (token < count)[:, None] & (column < width)[None, :]
    total = tl.zeros((ROWS, COLUMNS), WIDE)
    for j in range(K):
        place = tl.load(places + token * K + j, mask=token < count, other=-1).to(tl.int64)
        copied = valid & (place >= 0)[:, None]
        total += tl.load(rows + place[:, None] * width + column[None, :], mask=copied, other=0.0).to(WIDE)
    tl.store(tokens + token[:, None] * width + column[None, :], total.to(tokens.dtype.element_ty), mask=valid)


def rows_of_tokens_triton(tokens: Tensor, copies: Copies, notes_largest: bool = False) -> Tensor:
    """Computes `permute.rows_of_tokens`. `notes_largest`: the largest value of each row is noted for fp8."""
    tokens, count, width = tokens.contiguous(), copies.source.shape[0], tokens.shape[1]
    rows = tokens.new_empty(count, width)
    if copies.places.shape[1] > 1 and not notes_largest:
        places = copies.places.contiguous()
        if count and places.numel():
            # Token by token, so that each is read once: copies of a token are far apart in the order of rows.
            grid, tile = _tiles(places.shape[0], width)
            _spread_kernel[grid](rows, tokens, places, *tokens.shape, K=places.shape[1], **tile)
    elif count:
        grid, tile = _tiles(count, width)
        largest = None
        if notes_largest and tokens.dtype is not torch.float64:
            largest = torch.zeros(count, dtype=torch.int32, device=tokens.device)
        source = copies.source.contiguous()
        _rows_kernel[grid](rows, largest, tokens, source, count, width, **tile, NOTES=largest is not None)
        if largest is not None:
            note_largest(rows, largest.view(torch.float32))
    return rows


def tokens_of_rows_triton(rows: Tensor, copies: Copies) -> Tensor:
    """Computes `permute.tokens_of_rows`."""
    rows, places = rows.contiguous(), copies.places.contiguous()
    (count, k), width = places.shape, rows.shape[1]
    tokens = rows.new_empty(count, width)
    if count:
        grid, tile = _tiles(count, width)
        wide = tl.float64 if rows.dtype is torch.float64 else tl.float32
        _tokens_kernel[grid](tokens, rows, places, count, width, K=k, WIDE=wide, **tile)
    return tokens


def _tiles(count: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    columns = min(_TILE, next_power_of_2(width))
    rows = max(1, min(_TILE // columns, 256))
    return (cdiv(count, rows), cdiv(width, columns)), {"ROWS": rows, "COLUMNS": columns}


@triton.jit
def _count_kernel(  # type: ignore[no-untyped-def]
    numbers, counts, groups, choices, num_groups, blocks, CHOICES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    i = block * CHOICES + tl.arange(0, CHOICES)
    group = tl.load(groups + i, mask=i < choices, other=-1).to(tl.int32)
    number = tl.full((CHOICES,), -1, tl.int32)
    for first in range(0, num_groups, GROUPS):
        candidate = first + tl.arange(0, GROUPS)
        same = (group[:, None] == candidate[None, :]).to(tl.int32)
        number += tl.sum(same * tl.cumsum(same, 0), 1)
        tl.store(counts + candidate * blocks + block, tl.sum(same, 0), mask=candidate < num_groups)
    tl.store(numbers + i, number, mask=i < choices)


@triton.jit
def _place_kernel(  # type: ignore[no-untyped-def]
    source, choice, places, starts, numbers, groups, first, choices, rows, k, blocks,
    HAS_FIRST: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    i = block * CHOICES + tl.arange(0, CHOICES)
    group = tl.load(groups + i, mask=i < choices, other=-1).to(tl.int64)
    goes = group >= 0
    place = tl.load(starts + group * blocks + block, mask=goes, other=0).to(tl.int64)
    place += tl.load(numbers + i, mask=goes, other=0)
    if HAS_FIRST:
        begin = tl.load(first + group, mask=goes, other=-1)
        place += begin - tl.load(starts + group * blocks, mask=goes, other=0)
        goes &= begin >= 0
    tl.store(places + i, tl.where(goes, place, -1), mask=i < choices)
    goes &= place < rows
    tl.store(choice + place, i.to(tl.int64), mask=goes)
    tl.store(source + place, (i // k).to(tl.int64), mask=goes)


class ChoiceNumbersTriton(ChoiceNumbers):
    """Computes `permute.ChoiceNumbers` by counting: each choice counts the earlier choices of its group in its block,
    and a running sum over groups and blocks gives the first row of each block's part of a group."""

    def __init__(self, groups: Tensor, num_groups: int) -> None:
        self.groups, self.num_groups = groups.contiguous(), num_groups
        self._blocks = max(1, cdiv(groups.numel(), _CHOICES))
        self._number = groups.new_empty(groups.numel(), dtype=torch.int32)
        self._in_blocks = groups.new_empty(num_groups, self._blocks, dtype=torch.int32)
        _count_kernel[(self._blocks,)](
            self._number, self._in_blocks, self.groups, groups.numel(), num_groups, self._blocks,
            CHOICES=_CHOICES, GROUPS=_GROUPS,
        )  # fmt: skip
        flat = self._in_blocks.view(-1)
        self._starts = flat.cumsum(0, dtype=torch.int32) - flat

    @functools.cached_property
    def counts(self) -> Tensor:  # type: ignore[override]  # computed when it is read
        """int64 [groups]: the number of choices in each group."""
        return self._in_blocks.sum(1)

    def copies(self, rows: int, first: Tensor | None = None) -> tuple[Copies, Tensor]:
        """Computes `permute.ChoiceNumbers.copies`."""
        groups = self.groups
        places = torch.empty_like(groups, dtype=torch.int64)
        source, choice = places.new_empty(rows), places.new_empty(rows)
        _place_kernel[(self._blocks,)](
            source, choice, places, self._starts, self._number, groups, places if first is None else first,
            groups.numel(), rows, groups.shape[1], self._blocks, HAS_FIRST=first is not None, CHOICES=_CHOICES,
        )  # fmt: skip
        return Copies(source, places), choice


TRITON_MOVES = Moves(rows_of_tokens_triton, tokens_of_rows_triton)
_NOTING_MOVES = Moves(functools.partial(rows_of_tokens_triton, notes_largest=True), tokens_of_rows_triton)


def permute_triton(tokens: Tensor, copies: Copies, notes_largest: bool = False) -> Tensor:
    """Computes `permute.permute`. `notes_largest`: the largest value of each row is noted for fp8."""
    return permute(tokens, copies, _NOTING_MOVES if notes_largest else TRITON_MOVES)


def unpermute_triton(rows: Tensor, copies: Copies, notes_largest: bool = False) -> Tensor:
    """Computes `permute.unpermute`. `notes_largest`: the largest value of each row of the gradient is noted for fp8."""
    return unpermute(rows, copies, _NOTING_MOVES if notes_largest else TRITON_MOVES)
