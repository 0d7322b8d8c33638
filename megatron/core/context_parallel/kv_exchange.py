"""Sends keys and values to the queries of other ranks, and returns their gradients, step by step: the keys of one step
are sent while the previous step computes.

Keys and values are sent as one tensor of rows [rows, width]. Gradients are sent in their own type and summed in float32
at least.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.communication.collectives import (
    Group,
    Pending,
    start_all_to_all_rows,
    start_exchange,
    start_gather_rows,
)
from megatron.core.context_parallel.splitting import in_natural_order, in_rank_order
from megatron.core.context_parallel.tiles import (
    QueryKeyTile,
    Reach,
    Span,
    own_tiles,
    rows_seen,
    spans_of,
    tiles_between,
    tiles_of,
    with_keys_from,
)
from megatron.core.ops.precision import at_least_float32
from megatron.core.tokens import SequencePart


class PendingKeyValues:
    """Rows that are being sent. `wait` returns them."""

    def __init__(self, pending: Pending, finish: Callable[[Tensor], Tensor]) -> None:
        self._pending, self._finish = pending, finish

    def wait(self) -> Tensor:
        """Returns the result. On CUDA it is ready for kernels of the current stream."""
        return self._finish(self._pending.wait())


class KeyValueExchange(Protocol):
    """One rank's steps of an exchange of keys. In step 0 the rank computes with its own keys."""

    @property
    def steps(self) -> tuple[tuple[QueryKeyTile, ...], ...]:
        """The tiles that this rank computes in each step, with the keys fetched for that step."""

    def start_fetch(self, step: int, own: Tensor) -> PendingKeyValues:
        """Starts to fetch the keys of step 1 or later; `own` [s, width] are this rank's keys."""

    def start_return(self, step: int, gradient: Tensor, total: Tensor) -> PendingKeyValues:
        """Starts to return the gradient of a step's keys to their rank. `wait` adds the gradients that other ranks
        return for this rank's keys to `total` [s, width]."""


# ---------------------------------------------------------------------------------------------------------------------
# From rank to rank (p2p)


@dataclass(frozen=True)
class RingStep:
    """A step of the ring: every rank computes with the keys of the rank `distance` before it."""

    distance: int
    tiles: tuple[QueryKeyTile, ...]
    fetched: slice
    """Rows of the other rank's keys that this rank needs."""
    given: slice
    """Rows of this rank's keys that the rank `distance` behind it needs."""


class Ring:
    """Ring attention's exchange: each step fetches keys from one other rank, nearest first.

    Ranks send only the rows that are needed, directly from their owner. Steps in which no rank needs keys, as with a
    short window, are left out.
    """

    def __init__(self, part: SequencePart, group: Group, chunk: int, reach: Reach, join: bool) -> None:
        self.part, self.group = part, group
        self.ring_steps = ring_steps(part, chunk, reach, join)

    @property
    def steps(self) -> tuple[tuple[QueryKeyTile, ...], ...]:
        """The tiles of each step."""
        return tuple(ring_step.tiles for ring_step in self.ring_steps)

    def start_fetch(self, step: int, own: Tensor) -> PendingKeyValues:
        """Starts to fetch the rows of another rank's keys that the step needs; `own` [rows, width] are this rank's
        keys."""
        ring_step = self.ring_steps[step]
        arriving = own.new_empty(ring_step.fetched.stop - ring_step.fetched.start, own.shape[1])
        pending = start_exchange(
            own[ring_step.given], self._after(ring_step), arriving, self._before(ring_step), self.group
        )
        return PendingKeyValues(pending, lambda rows: rows)

    def start_return(self, step: int, gradient: Tensor, total: Tensor) -> PendingKeyValues:
        """Starts to return the gradient of fetched keys; returned rows are added to `total`."""
        ring_step = self.ring_steps[step]
        arriving = gradient.new_empty(ring_step.given.stop - ring_step.given.start, gradient.shape[1])
        pending = start_exchange(gradient, self._before(ring_step), arriving, self._after(ring_step), self.group)
        return PendingKeyValues(pending, lambda rows: total[ring_step.given].add_(rows))

    def _before(self, ring_step: RingStep) -> int:
        return (self.part.rank - ring_step.distance) % self.part.size

    def _after(self, ring_step: RingStep) -> int:
        return (self.part.rank + ring_step.distance) % self.part.size


@functools.lru_cache(maxsize=256)
def ring_steps(part: SequencePart, chunk: int, reach: Reach, join: bool) -> tuple[RingStep, ...]:
    """Returns the steps of a rank. All ranks take steps of the same distances, in the same order."""
    size, here = part.size, part.rank
    nothing = slice(0, 0)
    ring_steps = [RingStep(0, own_tiles(part, chunk, reach, join), nothing, nothing)]
    for distance in range(1, size):
        if any(tiles_between(part, rank, (rank - distance) % size, chunk, reach, join) for rank in range(size)):
            tiles = tiles_between(part, here, (here - distance) % size, chunk, reach, join)
            fetched = rows_seen(tiles)
            given = rows_seen(tiles_between(part, (here + distance) % size, here, chunk, reach, join))
            ring_steps.append(RingStep(distance, with_keys_from(tiles, fetched.start), fetched, given))
    return tuple(ring_steps)


# ---------------------------------------------------------------------------------------------------------------------
# From all ranks at once (all_gather)


class Gather:
    """All-gather's exchange in two steps: each chunk of queries first uses the rank's own keys while the keys of all
    ranks are gathered, and then the other keys."""

    def __init__(self, part: SequencePart, group: Group, chunk: int, reach: Reach, join: bool) -> None:
        self.part, self.group = part, group
        self.steps = gather_steps(part, chunk, reach)

    def start_fetch(self, step: int, own: Tensor) -> PendingKeyValues:
        """Starts to gather the keys of all ranks; `own` [rows, width] are this rank's keys."""
        size = self.part.size
        return PendingKeyValues(start_gather_rows(own, self.group), lambda rows: in_natural_order(rows, size))

    def start_return(self, step: int, gradient: Tensor, total: Tensor) -> PendingKeyValues:
        """Starts to return the gradient of gathered keys; the sum over all ranks is added to `total`."""
        size = self.part.size
        pending = start_all_to_all_rows(in_rank_order(gradient, size), self.group)
        return PendingKeyValues(pending, lambda rows: total.add_(sum_of_parts(rows, size)))


@functools.lru_cache(maxsize=256)
def gather_steps(part: SequencePart, chunk: int, reach: Reach) -> tuple[tuple[QueryKeyTile, ...], ...]:
    """Returns the tiles of the two steps: with the rank's own keys, and with the keys of the whole row."""
    own, rest = [], []
    for span in spans_of(part, chunk):
        end = span.position + chunk
        others = [Span(0, 0, span.position), Span(end, end, 2 * part.size * chunk - end)]
        own += tiles_of([span], [span], reach)
        rest += tiles_of([span], others, reach)
    return tuple(own), tuple(rest)


def sum_of_parts(rows: Tensor, ranks: int) -> Tensor:
    """Returns the sum [n, width] of n rows from each rank [ranks * n, width], in float32 at least."""
    return torch.sum(rows.unflatten(0, (ranks, -1)), 0, dtype=at_least_float32(rows.dtype))
