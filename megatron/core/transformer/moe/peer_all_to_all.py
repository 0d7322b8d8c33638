"""All-to-alls of rows by copy engines, which write into the memory of the other GPUs of a host.

Neither the copies nor the words that announce arrived data need a multiprocessor (`megatron.core.peer_memory`), so they
run in parallel with matrix products. NCCL's kernels need multiprocessors, so kernels and products would wait for each
other.
"""

import math
import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.collectives import Group, group_rank, group_ranks
from megatron.core.peer_memory import PeerMemory, SymmetricMemory
from megatron.core.traffic import record_traffic


class RowRing:
    """A group's memory for all-to-alls of rows of one shape and type. It has `DEPTH` places, each for one all-to-all at
    a time.

    All-to-alls are numbered from 1; number n uses place n modulo DEPTH of every rank's memory, where each source rank
    has a slot of `most` rows. The memory of a rank has two words for each place and each other rank r: `arrived` is the
    last all-to-all whose rows r has written there, and `freed` is the last one in that place that r has finished
    reading in its own memory. A sender waits for `freed` of number n - DEPTH before it writes.
    """

    DEPTH = 3
    """Number of all-to-alls whose memory may be in use: one for each of two micro-batches that take turns, and one that
    is still being read."""

    def __init__(
        self, memory: PeerMemory, global_ranks: tuple[int, ...], rank: int, most: int, shape: tuple[int, ...]
    ) -> None:
        self.memory, self.global_ranks, self.rank = memory, global_ranks, rank
        self.most, self.shape = most, shape
        self.number = 0
        """Number of the last all-to-all that was started."""
        self.in_use: set[int] = set()
        """Places of the all-to-alls that this rank has started and not finished."""

    @classmethod
    def sizes(cls, ranks: int, most: int, row_bytes: int) -> tuple[int, int]:
        """Returns the bytes of data and the number of words that a rank's memory has."""
        return cls.DEPTH * cls._place_bytes(ranks, most, row_bytes), 2 * cls.DEPTH * ranks

    @staticmethod
    def _place_bytes(ranks: int, most: int, row_bytes: int) -> int:
        return -(-ranks * most * row_bytes // 256) * 256  # aligned for every kernel

    def slots(self, rank: int, place: int, dtype: torch.dtype) -> Tensor:
        """Returns a place of a rank's memory: [ranks, most, *shape], by source rank."""
        ranks, row_bytes = len(self.global_ranks), math.prod(self.shape) * dtype.itemsize
        start = place * self._place_bytes(ranks, self.most, row_bytes)
        return self.memory.view(rank, start, (ranks, self.most, *self.shape), dtype)

    def arrived(self, place: int, rank: int) -> int:
        """Returns the index of the word that `rank` writes after its rows."""
        return place * len(self.global_ranks) + rank

    def freed(self, place: int, rank: int) -> int:
        """Returns the index of the word that `rank` writes when it has read the rows that it received in this place."""
        return (self.DEPTH + place) * len(self.global_ranks) + rank

    def start(self, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> "PendingRows":
        """Starts to send `sent[i]` of the rows to rank i and to receive `received[i]` rows from it, both in group
        order."""
        self.number += 1
        place = self.number % self.DEPTH
        assert place not in self.in_use, f"more than {self.DEPTH} all-to-alls are under way"
        self.in_use.add(place)
        return PendingRows(self, self.number, rows.detach().contiguous(), received, sent)


class PendingRows:
    """An all-to-all that has started."""

    def __init__(self, ring: RowRing, number: int, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        assert max(*received, *sent) <= ring.most, (received, sent, ring.most)
        self.tensor = rows.new_empty(sum(received), *ring.shape)
        """Has the result after `wait`."""
        self._ring, self._number, self._received = ring, number, received
        self._place = number % ring.DEPTH
        self._parts: Sequence[Tensor] = rows.split(list(sent))  # kept alive until the copies are made
        record_traffic("all_to_all", rows, lambda: ring.global_ranks, kept_rows=sent[ring.rank])
        copies, before = ring.memory.copies, number - ring.DEPTH
        copies.follow()
        for to in self._others():
            if before > 0:
                copies.wait(ring.freed(self._place, to), before)
            if sent[to]:
                copies.copy(ring.slots(to, self._place, rows.dtype)[ring.rank, : sent[to]], self._parts[to])
            copies.write(to, ring.arrived(self._place, ring.rank), number)

    def _others(self) -> list[int]:
        """Returns the other ranks, the next one first, so that not all write into the same memory."""
        ranks = len(self._ring.global_ranks)
        return [(self._ring.rank + distance) % ranks for distance in range(1, ranks)]

    def wait(self) -> Tensor:
        """Returns the received rows in group order. Later kernels of the current stream wait for them, the host does
        not. Call it once."""
        ring, memory, own = self._ring, self._ring.memory, self._parts[self._ring.rank]
        for source in self._others():
            memory.signals.wait(ring.arrived(self._place, source), self._number)
        memory.signals.lead()
        slots = ring.slots(ring.rank, self._place, own.dtype)
        for source, end in enumerate(accumulate(self._received)):
            count = self._received[source]
            if count:
                self.tensor[end - count : end].copy_(own if source == ring.rank else slots[source, :count])
        memory.copies.lead()  # later kernels may use the memory of the rows that were sent
        self._parts = ()
        memory.signals.follow()
        for source in self._others():
            memory.signals.write(source, ring.freed(self._place, ring.rank), self._number)
        ring.in_use.remove(self._place)
        return self.tensor


def start_copied_rows(
    rows: Tensor, group: Group, received: Sequence[int], sent: Sequence[int], most: int
) -> PendingRows:
    """Starts an all-to-all of rows on GPUs. `most` is equal on all ranks; it is the largest number of rows that one
    rank sends to another. The first call with this `most`, shape and type waits for the current stream and for the
    other ranks. Raises UserError if the GPUs cannot access each other's memory."""
    assert isinstance(group, ProcessGroup)
    rings = _RINGS.setdefault(group, {})
    key = most, tuple(rows.shape[1:]), rows.dtype
    if key not in rings:
        ranks, shape = group_ranks(group), tuple(rows.shape[1:])
        sizes = RowRing.sizes(len(ranks), most, math.prod(shape) * rows.dtype.itemsize)
        first = next(iter(rings.values())).memory if rings else None
        assert first is None or isinstance(first, SymmetricMemory)
        memory = SymmetricMemory(group, *sizes, rows.device, first)
        rings[key] = RowRing(memory, ranks, group_rank(group), most, shape)
    return rings[key].start(rows, received, sent)


_RINGS: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, tuple[int, ...], torch.dtype], RowRing]]
_RINGS = weakref.WeakKeyDictionary()
"""The rings of each group. They are freed with the group."""
