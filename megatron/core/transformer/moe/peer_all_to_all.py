"""Exchanges of rows by copy engines, which write into the memory of the other GPUs of a host.

Neither the copies nor the words that announce arrived data need a multiprocessor
(`megatron.core.communication.peer_memory`), so they run in parallel with matrix products. NCCL's kernels need
multiprocessors, so kernels and products would wait for each other.
"""

import math
import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.communication.collectives import Group, group_rank, group_ranks
from megatron.core.communication.peer_memory import PeerMemory, SymmetricMemory
from megatron.core.communication.piece_exchange import lacks_gpu
from megatron.core.communication.traffic import record_traffic
from megatron.core.exceptions import UserError
from megatron.core.transformer.transformer_config import TransformerConfig


class RowRing:
    """A group's memory for exchanges of rows of one shape and type. It has `DEPTH` places, each for one exchange at a
    time.

    Exchanges are numbered from 1; number n uses place n modulo DEPTH of every rank's memory, where each other rank has
    a slot of `most` rows. The memory of a rank has two words for each place and each other rank r: `arrived` is the
    last exchange whose rows r has written there, and `freed` is the last one in that place that r has finished reading
    in its own memory. A sender waits for `freed` of number n - DEPTH before it writes.
    """

    DEPTH = 3
    """Number of exchanges whose memory may be in use: one for each of two micro-batches that take turns, and one that
    is still being read."""

    def __init__(
        self, memory: PeerMemory, global_ranks: tuple[int, ...], rank: int, most: int, shape: tuple[int, ...]
    ) -> None:
        self.memory, self.global_ranks, self.rank = memory, global_ranks, rank
        self.most, self.shape = most, shape
        self.number = 0
        """Number of the last exchange that was started."""
        self.in_use: set[int] = set()
        """Places of the exchanges that this rank has started and not finished."""
        ranks = len(global_ranks)
        self.others = [(rank + distance) % ranks for distance in range(1, ranks)]
        """The other ranks, the next one first, so that not all write into the same memory."""

    @classmethod
    def sizes(cls, ranks: int, most: int, row_bytes: int) -> tuple[int, int]:
        """Returns the bytes of data and the number of words that a rank's memory has."""
        return cls.DEPTH * cls._place_bytes(ranks, most, row_bytes), 2 * cls.DEPTH * ranks

    @staticmethod
    def _place_bytes(ranks: int, most: int, row_bytes: int) -> int:
        return -(-(ranks - 1) * most * row_bytes // 256) * 256  # aligned for every kernel

    def slots(self, rank: int, place: int, dtype: torch.dtype) -> Tensor:
        """Returns a place of a rank's memory: [ranks - 1, most, *shape], for the rank behind it first."""
        others, row_bytes = len(self.others), math.prod(self.shape) * dtype.itemsize
        start = place * self._place_bytes(others + 1, self.most, row_bytes)
        return self.memory.view(rank, start, (others, self.most, *self.shape), dtype)

    def arrived(self, place: int, rank: int) -> int:
        """Returns the index of the word that `rank` writes after its rows."""
        return place * len(self.global_ranks) + rank

    def freed(self, place: int, rank: int) -> int:
        """Returns the index of the word that `rank` writes when it has read the rows that it received in this place."""
        return (self.DEPTH + place) * len(self.global_ranks) + rank

    def open(self) -> "RingPlace":
        """Starts an exchange."""
        self.number += 1
        place = self.number % self.DEPTH
        assert place not in self.in_use, f"more than {self.DEPTH} exchanges are under way"
        self.in_use.add(place)
        return RingPlace(self, self.number)

    def start(self, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> "PendingRows":
        """Starts to send `sent[i]` of the rows to rank i and to receive `received[i]` rows from it, both in group
        order."""
        return PendingRows(self, rows.detach().contiguous(), received, sent)


class RingPlace:
    """An exchange that has started: its place of the memory. Send to every other rank once, then close it."""

    def __init__(self, ring: RowRing, number: int) -> None:
        self.ring = ring
        self._number, self._place = number, number % ring.DEPTH
        self._kept: list[Tensor] = []
        """The rows that are being sent."""

    def send(self, to: int, rows: Tensor) -> None:
        """Starts to send rows to a rank, after all work of the current stream so far. They may not change before the
        exchange is closed."""
        ring, copies, before = self.ring, self.ring.memory.copies, self._number - self.ring.DEPTH
        self._kept.append(rows)
        copies.follow()
        if before > 0:
            copies.wait(ring.freed(self._place, to), before)
        if rows.shape[0]:
            slot = (ring.rank - to - 1) % len(ring.global_ranks)
            copies.copy(ring.slots(to, self._place, rows.dtype)[slot, : rows.shape[0]], rows)
        copies.write(to, ring.arrived(self._place, ring.rank), self._number)

    def wait(self, source: int) -> None:
        """Lets later kernels of the current stream wait for the rows of a rank. The host does not wait."""
        signals = self.ring.memory.signals
        signals.wait(self.ring.arrived(self._place, source), self._number)
        signals.lead()

    def rows_of(self, source: int, count: int, dtype: torch.dtype) -> Tensor:
        """Returns the first `count` rows of a rank, in this rank's memory, after `wait`."""
        ring = self.ring
        return ring.slots(ring.rank, self._place, dtype)[(source - ring.rank - 1) % len(ring.global_ranks), :count]

    def rows_of_all(self, dtype: torch.dtype) -> Tensor:
        """Returns the slots of all other ranks, [ranks - 1, most, *shape], after `wait` for each."""
        return self.ring.slots(self.ring.rank, self._place, dtype)

    def close(self) -> None:
        """Frees the memory on all ranks when the current stream has done its work so far."""
        ring, signals = self.ring, self.ring.memory.signals
        ring.memory.copies.lead()  # later kernels may use the memory of the rows that were sent
        self._kept.clear()
        signals.follow()
        for source in ring.others:
            signals.write(source, ring.freed(self._place, ring.rank), self._number)
        ring.in_use.remove(self._place)


class PendingRows:
    """An all-to-all that has started."""

    def __init__(self, ring: RowRing, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        assert max(*received, *sent) <= ring.most, (received, sent, ring.most)
        self._place, self._received, self._rank = ring.open(), received, ring.rank
        self.tensor = rows.new_empty(sum(received), *ring.shape)
        """Has the result after `wait`."""
        parts = rows.split(list(sent))
        self._own = parts[ring.rank]
        record_traffic("all_to_all", rows, lambda: ring.global_ranks, kept_rows=sent[ring.rank])
        for to in ring.others:
            self._place.send(to, parts[to])

    def wait(self) -> Tensor:
        """Returns the received rows in group order. Later kernels of the current stream wait for them, the host does
        not. Call it once."""
        for source in self._place.ring.others:
            self._place.wait(source)
        for source, end in enumerate(accumulate(self._received)):
            count = self._received[source]
            if count:
                is_own = source == self._rank
                rows = self._own if is_own else self._place.rows_of(source, count, self.tensor.dtype)
                self.tensor[end - count : end].copy_(rows)
        self._place.close()
        del self._own
        return self.tensor


def start_copied_rows(
    rows: Tensor, group: Group, received: Sequence[int], sent: Sequence[int], most: int
) -> PendingRows:
    """Starts an all-to-all of rows on GPUs. `most` is equal on all ranks; it is the largest number of rows that one
    rank sends to another. Raises as `ring_of` does."""
    return ring_of(rows, group, most).start(rows, received, sent)


def ring_of(rows: Tensor, group: Group, most: int) -> RowRing:
    """Returns the memory for exchanges of rows like these [n, ...] between GPUs, at most `most` from one rank to
    another. The first call with this `most`, shape and type waits for the current stream and for the other ranks.
    Raises UserError if the GPUs cannot access each other's memory."""
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
    return rings[key]


_RINGS: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, tuple[int, ...], torch.dtype], RowRing]]
_RINGS = weakref.WeakKeyDictionary()
"""The rings of each group. They are freed with the group."""


def uses_peers(config: TransformerConfig) -> bool:
    """Returns whether tokens have to be written into the memory of other GPUs. Raises UserError without a GPU."""
    if config.moe_dispatcher_transport != "symmetric-memory":
        return False
    if lacks_gpu():
        raise UserError(
            "--moe-dispatcher-transport symmetric-memory: this process has no GPU; process-group works on every device"
        )
    return True
