"""Permutation of tokens for experts: one row per (token, expert) pair, and the sum of a token's rows.

Each of the two is the gradient of the other. Both write every output once, in a fixed order and without atomic
additions, so results are bit-equal in every run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.utils.autograd_context import AutogradContext


@dataclass(frozen=True)
class Copies:
    """Which rows are copies of which tokens."""

    source: Tensor
    """int64 [n]: the token of each row."""
    places: Tensor
    """int64 [t, k]: the rows of each token; -1 where a token has fewer than k."""


def rows_of_tokens(tokens: Tensor, copies: Copies) -> Tensor:
    """Copies tokens [t, h] into rows [n, h]."""
    return tokens.index_select(0, copies.source)


def _sum_rows(rows: Tensor, places: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_zeros(places.shape[0], rows.shape[1], dtype=wide)
    if rows.shape[0]:
        for place in places.unbind(1):
            total += torch.where((place >= 0)[:, None], rows.index_select(0, place.clamp(min=0)), 0)
    return total.to(rows.dtype)


def tokens_of_rows(rows: Tensor, copies: Copies) -> Tensor:
    """Sums the rows [n, h] of each token: [t, h], in float32 at least, rounded once."""
    if copies.places.shape[1] == 1 and copies.source.shape[0] == copies.places.shape[0]:  # every token has one row
        return rows.index_select(0, copies.places[:, 0])
    return _sum_rows(rows, copies.places)


@dataclass(frozen=True)
class Moves:
    """Implementations of `rows_of_tokens` and `tokens_of_rows`."""

    rows: Callable[[Tensor, Copies], Tensor] = rows_of_tokens
    tokens: Callable[[Tensor, Copies], Tensor] = tokens_of_rows


PLAIN_MOVES = Moves()


def permute(tokens: Tensor, copies: Copies, moves: Moves = PLAIN_MOVES) -> Tensor:
    """Computes `rows_of_tokens`, differentiable: a token's gradient is the sum of its rows' gradients."""
    return _Moved.apply(tokens, copies, moves.rows, moves.tokens)


def unpermute(rows: Tensor, copies: Copies, moves: Moves = PLAIN_MOVES) -> Tensor:
    """Computes `tokens_of_rows`, differentiable: a row's gradient is its token's gradient."""
    return _Moved.apply(rows, copies, moves.tokens, moves.rows)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        inputs: Tensor,
        copies: Copies,
        move: Callable[[Tensor, Copies], Tensor],
        move_gradient: Callable[[Tensor, Copies], Tensor],
    ) -> Tensor:
        ctx.copies, ctx.move_gradient = copies, move_gradient
        return move(inputs, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.move_gradient(gradient.contiguous(), ctx.copies), None, None, None


class ChoiceNumbers:
    """The choices of tokens that each go to k different groups, numbered from 0 within their group. Nothing here waits
    for the device."""

    def __init__(self, groups: Tensor, num_groups: int) -> None:
        """`groups` is an integer tensor [t, k]; a choice with a negative number is in no group."""
        self.groups, self.num_groups = groups, num_groups
        flat = groups.flatten().to(torch.int64)
        self._group = torch.where(flat < 0, num_groups, flat)  # the others are sorted behind all groups
        counts = flat.new_zeros(num_groups + 1).scatter_add_(0, self._group, torch.ones_like(flat))
        self._starts = counts.cumsum(0) - counts
        self.counts = counts[:-1]
        """int64 [groups]: the number of choices in each group."""
        order = self._group.to(torch.int32).argsort(stable=True)
        self._number = torch.empty_like(order)
        self._number[order] = torch.arange(order.shape[0], device=order.device) - self._starts[self._group[order]]

    def copies(self, rows: int, first: Tensor | None = None) -> tuple[Copies, Tensor]:
        """Returns the copies of tokens, sorted by token within a group.

        The copies of group g begin in row `first[g]` (int64 [groups]); -1 leaves a group out. Without `first` the
        groups follow each other from row 0. `rows` is the number of copies, or a larger number if the values of the
        rows behind them do not matter. The second result says which of the t * k choices each row is (int64 [rows]).
        """
        first = self._starts if first is None else F.pad(first, (0, 1), value=-1)
        first = torch.where(self._group < self.num_groups, first[self._group], -1)
        place = torch.where(first < 0, -1, first + self._number)
        choice = place.new_zeros(rows + 1)
        choice.scatter_(0, torch.where(place < 0, rows, place), torch.arange(place.shape[0], device=place.device))
        choice = choice[:rows]
        return Copies(choice // self.groups.shape[1], place.view_as(self.groups)), choice
