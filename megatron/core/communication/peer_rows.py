"""Gathers rows that stay in the memory of their ranks, by copies that each rank makes for itself.

The weights that ranks shard lie in memory that GPUs of one host share (`PeerMemory`). To gather them a rank copies
every other rank's part, so that a gather needs no multiprocessor, which a running matrix product occupies. Every rank
makes the same gathers in the same order, numbered from 1. The memory of a rank has two words for each other rank r:
`ready` is the last gather for which r's rows hold their values, and `read` is the last gather for which r has copied
this rank's rows.
"""

import socket
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron.core.communication.collectives import Group, all_reduce, group_rank, group_ranks
from megatron.core.communication.peer_memory import WITHOUT_SHARED_MEMORY, PeerMemory, SymmetricMemory
from megatron.core.communication.traffic import record_traffic
from megatron.core.exceptions import UserError

_ALIGNMENT = 256
"""Bytes: parts begin at multiples of it, as kernels expect."""


class PeerRows:
    """The rows of all ranks of a group, as seen from one rank."""

    def __init__(self, memory: PeerMemory, global_ranks: tuple[int, ...], rank: int) -> None:
        self.memory, self.global_ranks, self.rank = memory, global_ranks, rank
        self.number = 0
        """Number of the last gather."""
        self._awaited = 0
        """The last gather for which all ranks are known to have copied this rank's rows."""

    @property
    def _others(self) -> list[int]:
        ranks = len(self.global_ranks)
        return [(self.rank + distance) % ranks for distance in range(1, ranks)]

    def _ready(self, rank: int) -> int:
        return rank

    def _read(self, rank: int) -> int:
        return len(self.global_ranks) + rank

    def start_gather(self, start: int, out: Tensor) -> "CopiedRows":
        """Starts to copy the rows at byte `start` of every rank's memory into `out`: contiguous, the ranks' parts one
        after the other."""
        self.number += 1
        lane, parts = self.memory.copies, out.view(len(self.global_ranks), -1)
        shape = tuple(parts[0].shape)
        record_traffic("all_gather", out, lambda: self.global_ranks)
        lane.follow()
        for other in self._others:
            lane.write(other, self._ready(self.rank), self.number)
        beside = self.memory.signals  # so that the links need not wait for this rank's own rows
        beside.follow()
        beside.copy(parts[self.rank], self.memory.view(self.rank, start, shape, out.dtype))
        for other in self._others:
            lane.wait(self._ready(other), self.number)
            lane.copy(parts[other], self.memory.view(other, start, shape, out.dtype))
            lane.write(other, self._read(self.rank), self.number)
        return CopiedRows(out, (beside.mark(), lane.mark()))

    def wait_for_readers(self) -> None:
        """Lets the current stream wait until all ranks have copied this rank's rows, for all gathers so far. Call it
        before the rows are overwritten."""
        if self._awaited == self.number:
            return
        for other in self._others:
            self.memory.signals.wait(self._read(other), self.number)
        self.memory.signals.lead()
        self._awaited = self.number


class CopiedRows:
    """A gather that has been started: a `Pending`."""

    def __init__(self, tensor: Tensor, waits: Sequence[Callable[[], None]]) -> None:
        self.tensor, self._waits = tensor, waits

    def wait(self) -> Tensor:
        """Returns the rows of all ranks, ready for later kernels of the current stream."""
        for wait in self._waits:
            wait()
        return self.tensor


def place_rows(group: Group, rows: Sequence[Tensor]) -> tuple[PeerRows, list[tuple[int, Tensor]]] | None:
    """Copies this rank's tensors, of the same sizes on all ranks of the group, into memory that the group shares.
    Returns the first byte of each there, and the tensor there. None if the ranks are no GPUs of one host. All ranks
    call it together and wait for each other."""
    if not isinstance(group, ProcessGroup) or not rows or not rows[0].is_cuda or group in WITHOUT_SHARED_MEMORY:
        return None
    device = rows[0].device
    starts, nbytes = [], 0
    for tensor in rows:
        starts.append(nbytes)
        nbytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    ranks = group_ranks(group)
    try:
        if not _share_a_host(group, device):
            return None
        memory = SymmetricMemory(group, nbytes, 2 * len(ranks), device)
    except UserError:  # on all ranks
        WITHOUT_SHARED_MEMORY.add(group)
        return None
    peers = PeerRows(memory, ranks, group_rank(group))
    placed = [memory.view(peers.rank, start, tuple(t.shape), t.dtype) for start, t in zip(starts, rows, strict=True)]
    for target, source in zip(placed, rows, strict=True):
        target.copy_(source)
    return peers, list(zip(starts, placed, strict=True))


def _share_a_host(group: ProcessGroup, device: torch.device) -> bool:
    name = zlib.crc32(socket.gethostname().encode())
    least, most = all_reduce(torch.tensor([-name, name], device=device), group, ReduceOp.MAX).tolist()
    return bool(-least == most)
