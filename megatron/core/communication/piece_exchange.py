"""Exchanges of equal pieces between all ranks of a group: each piece is sent while others are computed.

At distance d a rank sends a piece to rank + d and receives a piece from rank - d, modulo the number of ranks. An
all-gather sends the same piece at every distance; a reduce-scatter sends each rank its part of a product. Every rank of
the group opens the same exchanges in the same order, and in each it sends and receives once at every distance from 1 to
ranks - 1, then closes it.

There are two transports. `process-group` makes each distance a small collective of the process group, on any device.
With `symmetric-memory` the sender's copy engine writes into the receiver's memory, so that communication needs no
multiprocessor. docs/decisions/process-groups.md explains when memory can be used again.
"""

import math
import weakref
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.communication.collectives import (
    Group,
    Pending,
    PlannedGroup,
    group_rank,
    group_ranks,
    group_size,
    start_exchange,
)
from megatron.core.communication.peer_memory import WITHOUT_SHARED_MEMORY, PeerMemory, SymmetricMemory
from megatron.core.communication.traffic import record_traffic
from megatron.core.exceptions import UserError
from megatron.core.utils.activity import activity
from megatron.core.utils.warn import warn_on_first_rank

Transport = Literal["symmetric-memory", "process-group"]


class PieceExchange(Protocol):
    """One exchange. On CUDA no function waits on the host; later kernels of the current stream do."""

    slots: Tensor
    """[ranks, *piece]: slot r receives the piece of rank r. Valid until `close`."""
    ranks: int
    rank: int

    def send(self, piece: Tensor, distance: int) -> None:
        """Starts to send a contiguous piece, which has been computed in the current stream."""

    def keep(self, piece: Tensor) -> None:
        """Starts to copy a contiguous piece of this rank into its own slot. `close` waits for it."""

    def receive(self, distance: int) -> Tensor:
        """Returns the slot with the piece from the rank `distance` places before this one."""

    def receive_all(self) -> Tensor:
        """Returns all slots after all pieces have arrived: sent, received and kept ones."""

    def close(self) -> None:
        """Ends the exchange. Later kernels must not read its slots, and may overwrite the pieces that were sent."""


def open_exchange(group: Group, shape: tuple[int, ...], like: Tensor, transport: Transport | None) -> PieceExchange:
    """Opens an exchange of pieces of this shape, with the type and device of `like`. Default of `transport`: symmetric
    memory if the GPUs of the group share it, otherwise the process group. The first exchange over symmetric memory, and
    each exchange with larger pieces than before, waits for the current stream and for the other ranks. Raises UserError
    if `transport` is symmetric-memory and the GPUs do not share it."""
    if isinstance(group, PlannedGroup):
        return GroupExchange(group, shape, like)
    assert isinstance(group, ProcessGroup)
    if transport == "process-group" or (transport is None and (not like.is_cuda or group in WITHOUT_SHARED_MEMORY)):
        return GroupExchange(group, shape, like)
    try:
        return _open_shared(group, shape, like)
    except UserError as error:
        if transport is not None:
            raise
        warn_on_first_rank(
            f"--tp-comm-overlap sends pieces by collectives, which may be slower than --no-tp-comm-overlap. {error}"
        )
        WITHOUT_SHARED_MEMORY.add(group)
        return GroupExchange(group, shape, like)


def _open_shared(group: ProcessGroup, shape: tuple[int, ...], like: Tensor) -> PieceExchange:
    """Opens an exchange over symmetric memory. Raises UserError, on all ranks, if a GPU does not share it."""
    activity.begin("exchange", group.group_name, lambda: group_ranks(group))
    nbytes = math.prod(shape) * like.element_size()
    ring = _RINGS.get(group)
    if ring is None or ring.piece_bytes < nbytes:
        if ring is not None:
            ring.memory.signals.lead()  # the last words are written before the memory is given back
        memory = SymmetricMemory(group, *SlotRing.sizes(group_size(group), nbytes), like.device)
        ring = _RINGS[group] = SlotRing(memory, group_ranks(group), group_rank(group), nbytes)
    return ring.open(shape, like.dtype)


def lacks_gpu() -> bool:
    """Returns whether this process has no GPU but needs one: a dry run (modules on the meta device, no other ranks)
    needs none."""
    planned = torch.get_default_device().type == "meta" and not dist.is_initialized()
    return not torch.cuda.is_available() and not planned


def refuse_transport(transport: Transport | None) -> None:
    """Raises UserError if this machine does not have the transport, unless the run is only planned."""
    if transport == "symmetric-memory" and lacks_gpu():
        raise UserError(
            "--tp-comm-overlap-transport symmetric-memory needs GPUs that reach each other's memory, and this process "
            "has none; process-group works on every device"
        )


# ---------------------------------------------------------------------------------------------------------------------
# By collectives of the process group


class GroupExchange:
    """An exchange with its own memory. Each distance is a collective in which a rank sends and receives once."""

    def __init__(self, group: Group, shape: tuple[int, ...], like: Tensor) -> None:
        self.ranks, self.rank = group_size(group), group_rank(group)
        self.slots = like.new_empty(self.ranks, *shape)
        self._group = group
        self._pending: dict[int, Pending] = {}

    def send(self, piece: Tensor, distance: int) -> None:
        """Starts the collective of this distance."""
        to, source = (self.rank + distance) % self.ranks, (self.rank - distance) % self.ranks
        self._pending[distance] = start_exchange(piece, to, self.slots[source], source, self._group)

    def keep(self, piece: Tensor) -> None:
        """Copies the piece in the current stream."""
        self.slots[self.rank].copy_(piece)

    def receive(self, distance: int) -> Tensor:
        """Waits for the collective of this distance."""
        self._pending.pop(distance).wait()
        return self.slots[(self.rank - distance) % self.ranks]

    def receive_all(self) -> Tensor:
        """Waits for the collectives that are still pending."""
        for distance in list(self._pending):
            self.receive(distance)
        return self.slots

    def close(self) -> None:
        """Does nothing: the memory belongs to this exchange."""
        assert not self._pending, f"distances {list(self._pending)} were not received"


# ---------------------------------------------------------------------------------------------------------------------
# By writing into the memory of other ranks


class SlotRing:
    """Memory for `DEPTH` exchanges of a group, used in turn, and the words that mark when it can be used again.

    Exchanges are numbered from 1; exchange n uses place n modulo DEPTH of every rank's memory. The memory of a rank has
    two words for each place and each other rank r: `arrived` is the last exchange whose piece r has written there, and
    `freed` is the last exchange in that place whose slots r has finished reading in its own memory. A sender waits for
    `freed` of exchange n - DEPTH before it writes, so it never overwrites data that the receiver still reads.
    """

    DEPTH = 3
    """Number of exchanges whose memory may be in use. A layer has at most two open, so the third never waits for its
    own rank."""

    def __init__(self, memory: PeerMemory, global_ranks: tuple[int, ...], rank: int, piece_bytes: int) -> None:
        self.memory, self.global_ranks, self.rank = memory, global_ranks, rank
        self.piece_bytes = piece_bytes
        self.number = 0
        """Number of the last exchange that was opened."""
        self.in_use: set[int] = set()
        """Places of the exchanges that are open on this rank."""

    @classmethod
    def sizes(cls, ranks: int, piece_bytes: int) -> tuple[int, int]:
        """Returns the bytes of data and the number of words that a rank's memory has."""
        return cls.DEPTH * cls.place_bytes(ranks, piece_bytes), 2 * cls.DEPTH * ranks

    @staticmethod
    def place_bytes(ranks: int, piece_bytes: int) -> int:
        """Returns the bytes of a place: the slots of one exchange, aligned for every kernel."""
        return -(-ranks * piece_bytes // 256) * 256

    def arrived(self, place: int, rank: int) -> int:
        """Returns the index of the word that `rank` writes after its piece."""
        return place * len(self.global_ranks) + rank

    def freed(self, place: int, rank: int) -> int:
        """Returns the index of the word that `rank` writes when it has read the pieces that it received in this
        place."""
        return (self.DEPTH + place) * len(self.global_ranks) + rank

    def open(self, shape: tuple[int, ...], dtype: torch.dtype) -> "SlotExchange":
        """Opens the next exchange."""
        self.number += 1
        place = self.number % self.DEPTH
        assert place not in self.in_use, f"more than {self.DEPTH - 1} exchanges are open"
        self.in_use.add(place)
        return SlotExchange(self, self.number, shape, dtype)


class SlotExchange:
    """An exchange in a place of a `SlotRing`."""

    def __init__(self, ring: SlotRing, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.ring, self.number = ring, number
        self.ranks, self.rank = len(ring.global_ranks), ring.rank
        self._place = number % ring.DEPTH
        self._shape, self._dtype = (self.ranks, *shape), dtype
        self.slots = self._slots_of(self.rank)
        self._sent: dict[int, Tensor] = {}
        self._awaited = set(range(1, self.ranks))

    def _slots_of(self, rank: int) -> Tensor:
        start = self._place * self.ring.place_bytes(self.ranks, self.ring.piece_bytes)
        return self.ring.memory.view(rank, start, self._shape, self._dtype)

    def send(self, piece: Tensor, distance: int) -> None:
        """Copies the piece into the receiver's memory, after the receiver has read the earlier data there."""
        to, lane, ranks = (self.rank + distance) % self.ranks, self.ring.memory.copies, self.ring.global_ranks
        record_traffic("send", piece, lambda: (ranks[self.rank], ranks[to]))
        lane.follow()
        before = self.number - self.ring.DEPTH
        if before > 0:
            lane.wait(self.ring.freed(self._place, to), before)
        lane.copy(self._slots_of(to)[self.rank], piece)
        lane.write(to, self.ring.arrived(self._place, self.rank), self.number)
        self._sent[distance] = piece  # kept alive until the copy is made

    def keep(self, piece: Tensor) -> None:
        """Copies the piece on the stream of the copies to other ranks."""
        self.ring.memory.copies.follow()
        self.ring.memory.copies.copy(self.slots[self.rank], piece)

    def receive(self, distance: int) -> Tensor:
        """Lets the current stream wait for the word that is written after the piece."""
        source, ranks = (self.rank - distance) % self.ranks, self.ring.global_ranks
        self._awaited.remove(distance)
        record_traffic("receive", self.slots[source], lambda: (ranks[source], ranks[self.rank]))
        self.ring.memory.signals.wait(self.ring.arrived(self._place, source), self.number)
        self.ring.memory.signals.lead()
        return self.slots[source]

    def receive_all(self) -> Tensor:
        """Waits for all pieces, and for this rank's own copies."""
        for distance in sorted(self._awaited):
            self.receive(distance)
        self.ring.memory.copies.lead()
        return self.slots

    def close(self) -> None:
        """Tells the senders that all reads of the slots are queued on the current stream."""
        assert not self._awaited and len(self._sent) == self.ranks - 1, (self._awaited, list(self._sent))
        memory = self.ring.memory
        memory.copies.lead()  # later kernels may use the memory of the pieces
        self._sent.clear()
        memory.signals.follow()
        for distance in range(1, self.ranks):
            memory.signals.write(
                (self.rank - distance) % self.ranks, self.ring.freed(self._place, self.rank), self.number
            )
        self.ring.in_use.remove(self._place)


_RINGS: weakref.WeakKeyDictionary[ProcessGroup, SlotRing] = weakref.WeakKeyDictionary()
"""The ring of each group that has exchanged over symmetric memory. It is freed with the group."""
