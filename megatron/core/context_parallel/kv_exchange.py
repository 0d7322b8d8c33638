"""How keys and values reach the queries of other ranks, and how their gradients come back: step by step, so that what
one step computes with is under way while the one before computes.

Keys and values go as one tensor of rows [rows, width]. Gradients go in their type and are summed in float32 at least.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.collectives import Group, Pending, start_all_to_all_rows, start_exchange, start_gather_rows
from megatron.core.context_parallel.splitting import in_natural_order, in_rank_order
from megatron.core.context_parallel.tiles import (
    Reach,
    Span,
    Tile,
    own_tiles,
    rows_seen,
    spans_of,
    tiles_between,
    tiles_of,
    with_keys_from,
)
from megatron.core.ops.precision import at_least_float32
from megatron.core.tokens import SequencePart


class Arriving:
    """Something under way; `wait` gives it."""

    def __init__(self, pending: Pending, finish: Callable[[Tensor], Tensor]) -> None:
        self._pending, self._finish = pending, finish

    def wait(self) -> Tensor:
        """The result; on CUDA, ready for kernels of the current stream."""
        return self._finish(self._pending.wait())


class KeyValueExchange(Protocol):
    """Steps of one kind of exchange, as one rank takes them. In step 0 it computes with its own keys."""

    @property
    def steps(self) -> tuple[tuple[Tile, ...], ...]:
        """What this rank computes in each step, with the keys that were fetched for it."""

    def start_fetch(self, step: int, own: Tensor) -> Arriving:
        """Begin to fetch the keys of a step from 1; `own` are this rank's, [s, width]."""

    def start_return(self, step: int, gradient: Tensor, total: Tensor) -> Arriving:
        """Begin to give back the gradient of a step's keys; what comes for this rank's own is added to `total`
        [s, width] by `wait`."""


# ---------------------------------------------------------------------------------------------------------------------
# From rank to rank (p2p)


@dataclass(frozen=True)
class RingStep:
    """A step of the ring, in which every rank computes with the keys of the one that stands `distance` before it."""

    distance: int
    tiles: tuple[Tile, ...]
    fetched: slice
    """Rows of that rank's keys that this one needs."""
    given: slice
    """Rows of this rank's keys that the one `distance` behind it needs."""


class Ring:
    """Each step brings the keys of one other rank, nearer ones first: only those of its rows that are needed, straight
    from where they are. Steps in which no rank needs any, as under a short window, are left out."""

    def __init__(self, part: SequencePart, group: Group, chunk: int, reach: Reach, join: bool) -> None:
        self.part, self.group = part, group
        self.ring_steps = ring_steps(part, chunk, reach, join)

    @property
    def steps(self) -> tuple[tuple[Tile, ...], ...]:
        return tuple(ring_step.tiles for ring_step in self.ring_steps)

    def start_fetch(self, step: int, own: Tensor) -> Arriving:
        ring_step = self.ring_steps[step]
        arriving = own.new_empty(ring_step.fetched.stop - ring_step.fetched.start, own.shape[1])
        pending = start_exchange(
            own[ring_step.given], self._after(ring_step), arriving, self._before(ring_step), self.group
        )
        return Arriving(pending, lambda rows: rows)

    def start_return(self, step: int, gradient: Tensor, total: Tensor) -> Arriving:
        ring_step = self.ring_steps[step]
        arriving = gradient.new_empty(ring_step.given.stop - ring_step.given.start, gradient.shape[1])
        pending = start_exchange(gradient, self._before(ring_step), arriving, self._after(ring_step), self.group)
        return Arriving(pending, lambda rows: total[ring_step.given].add_(rows))

    def _before(self, ring_step: RingStep) -> int:
        return (self.part.rank - ring_step.distance) % self.part.size

    def _after(self, ring_step: RingStep) -> int:
        return (self.part.rank + ring_step.distance) % self.part.size


@functools.lru_cache(maxsize=256)
def ring_steps(part: SequencePart, chunk: int, reach: Reach, join: bool) -> tuple[RingStep, ...]:
    """The ring_steps that a rank takes; all ranks take those of the same distances, and at the same time."""
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
    """Two steps: each chunk of queries with its own keys while those of all ranks are gathered, then with the rest."""

    def __init__(self, part: SequencePart, group: Group, chunk: int, reach: Reach, join: bool) -> None:
        self.part, self.group = part, group
        self.steps = gather_steps(part, chunk, reach)

    def start_fetch(self, step: int, own: Tensor) -> Arriving:
        size = self.part.size
        return Arriving(start_gather_rows(own, self.group), lambda rows: in_natural_order(rows, size))

    def start_return(self, step: int, gradient: Tensor, total: Tensor) -> Arriving:
        size = self.part.size
        pending = start_all_to_all_rows(in_rank_order(gradient, size), self.group)
        return Arriving(pending, lambda rows: total.add_(sum_of_parts(rows, size)))


@functools.lru_cache(maxsize=256)
def gather_steps(part: SequencePart, chunk: int, reach: Reach) -> tuple[tuple[Tile, ...], ...]:
    """Tiles with a rank's own keys as they lie, and with those of the whole row in its order."""
    own, rest = [], []
    for span in spans_of(part, chunk):
        end = span.place + chunk
        others = [Span(0, 0, span.place), Span(end, end, 2 * part.size * chunk - end)]
        own += tiles_of([span], [span], reach)
        rest += tiles_of([span], others, reach)
    return tuple(own), tuple(rest)


def sum_of_parts(rows: Tensor, ranks: int) -> Tensor:
    """[ranks * n, width], n rows from each rank -> their sum [n, width], in float32 at least."""
    return torch.sum(rows.unflatten(0, (ranks, -1)), 0, dtype=at_least_float32(rows.dtype))
