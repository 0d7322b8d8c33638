"""Sends keys and values to the queries of other ranks, and returns their gradients, step by step: the keys of one step
are sent while the previous step computes.

Keys and values are sent as one tensor of rows [rows, width]. Gradients are sent in their own type and summed in float32
at least.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron.core.communication.collectives import Group, Pending, start_exchange
from megatron.core.context_parallel.tiles import (
    QueryKeyTile,
    Reach,
    own_tiles,
    rows_seen,
    tiles_between,
    with_keys_from,
)
from megatron.core.tokens import SequencePart


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
    """One rank's steps of ring attention's exchange: each fetches keys from one other rank, nearest first. In step 0
    the rank computes with its own keys.

    Ranks send only the rows that are needed, directly from their owner. Steps in which no rank needs keys, as with a
    short window, are left out.
    """

    def __init__(self, part: SequencePart, group: Group, chunk: int, reach: Reach, join: bool) -> None:
        self.part, self.group = part, group
        # Without the group, which the cache of `ring_steps` would keep alive.
        self.ring_steps = ring_steps(SequencePart(part.rank, part.size), chunk, reach, join)

    @property
    def steps(self) -> tuple[tuple[QueryKeyTile, ...], ...]:
        """The tiles that this rank computes in each step, with the keys fetched for that step."""
        return tuple(ring_step.tiles for ring_step in self.ring_steps)

    def start_fetch(self, step: int, own: Tensor) -> Pending:
        """Starts to fetch the rows of another rank's keys that the step needs; `own` [rows, width] are this rank's
        keys."""
        ring_step = self.ring_steps[step]
        arriving = own.new_empty(ring_step.fetched.stop - ring_step.fetched.start, own.shape[1])
        given, after, before = own[ring_step.given], self._after(ring_step), self._before(ring_step)
        return start_exchange(given, after, arriving, before, self.group)

    def start_return(self, step: int, gradient: Tensor, total: Tensor) -> Callable[[], Tensor]:
        """Starts to return the gradient of a step's keys to their rank. The function returned waits, and adds the
        gradients that other ranks return for this rank's keys to `total` [rows, width]."""
        ring_step = self.ring_steps[step]
        arriving = gradient.new_empty(ring_step.given.stop - ring_step.given.start, gradient.shape[1])
        pending = start_exchange(gradient, self._before(ring_step), arriving, self._after(ring_step), self.group)
        return lambda: total[ring_step.given].add_(pending.wait())

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
