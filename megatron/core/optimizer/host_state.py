"""Optimizer state in host memory, as in ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840).

The state of some units is in page-locked host memory. The update copies it to the device piece by piece, updates each
piece with the usual kernels, and copies it back. Copies in both directions run on separate streams, in parallel with
the update of another piece. The host never waits. An update on the CPU would have to wait for the gradients. It would
also be slower, because the update is limited by memory bandwidth, and CPU cores reach less than the bandwidth of host
memory. With a file behind host memory (`nvme_state`) the host waits for the disk.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.optimizer.segments import StateSegment
from megatron.core.optimizer.state_storage import StateTensor

PIECE = 1 << 23
"""Elements of a piece. With float32 weights and two moments, 100 MB."""
_SLOTS = 3
"""Number of pieces with memory on the device: one is copied in, one is updated, one is copied out."""
_ALIGNMENT = 256


def choose_offloaded(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Returns which units are offloaded. They are spread evenly: among the first n units, for any n, at most this
    fraction of the elements is offloaded."""
    chosen, total, taken = [], 0, 0
    for size in sizes:
        total += size
        chosen.append(taken + size <= fraction * total)
        taken += size * chosen[-1]
    return chosen


def in_host_memory(state: StateTensor, pinned: bool) -> StateTensor:
    """Returns the same numbers in host memory, page-locked if `pinned`. The model's weights stay where they are."""

    def copy(tensor: Tensor) -> Tensor:
        pin = pinned and tensor.is_cuda
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin).copy_(tensor)

    return state.moved(copy)


@dataclass(frozen=True)
class HostPiece:
    """A part of a unit's shard that is copied at once."""

    state: StateSegment
    segments: tuple[tuple[int, int, int], ...]
    """(number of the parameter group, start, stop) of the segments in the piece, counted from its first element."""

    @classmethod
    def of_shard(cls, shard: StateSegment, segments: Sequence[tuple[int, int, int]]) -> "Iterator[HostPiece]":
        """Yields the pieces of a shard, of at most PIECE elements."""
        numel = shard.gradient.numel()
        for first in range(0, numel, PIECE):
            end = min(first + PIECE, numel)
            cut = ((group, max(start, first) - first, min(stop, end) - first) for group, start, stop in segments)
            yield cls(shard.part(first, end), tuple(one for one in cut if one[1] < one[2]))


class Backing(Protocol):
    """Storage behind host memory, such as a file."""

    def begin(self) -> None:
        """Starts a round through all pieces."""

    def arrive(self, number: int) -> None:
        """Waits until a piece is in host memory."""

    def leave(self, number: int, copied: torch.cuda.Event | None) -> None:
        """Takes a piece from host memory, after an event."""

    def finish(self) -> None:
        """Waits until all pieces are in the storage."""


class StateStream:
    """Copies state to the device and back."""

    def __init__(self, device: torch.device, backing: Backing | None = None) -> None:
        self.device, self.backing = device, backing
        is_cuda = device.type == "cuda"
        self._coming = torch.cuda.Stream(device) if is_cuda else None
        self._going = torch.cuda.Stream(device) if is_cuda else None

    def each(self, pieces: Sequence[StateSegment]) -> Iterator[StateSegment]:
        """Yields each piece with its state on the device. When the next piece is requested, the state is copied back to
        host memory. The memory on the device is freed after the last piece."""
        if not pieces:
            return
        copies = [_DeviceCopy(piece) for piece in pieces]
        largest = max(copy.nbytes for copy in copies)
        slots = [_Slot(torch.empty(largest, dtype=torch.uint8, device=self.device)) for _ in copies[:_SLOTS]]
        if self._coming is not None and self._going is not None:
            self._coming.wait_stream(torch.cuda.current_stream(self.device))
            self._coming.wait_stream(self._going)
        if self.backing is not None:
            self.backing.begin()
        for number, copy in enumerate(copies):
            for ahead in range(0 if number == 0 else number + 1, min(number + 2, len(copies))):
                if self.backing is not None:
                    self.backing.arrive(ahead)
                copies[ahead].fetch(slots[ahead % _SLOTS], self._coming)
            yield copy.ready()
            copy.send_back(slots[number % _SLOTS], self._going)
            if self.backing is not None:
                self.backing.leave(number, slots[number % _SLOTS].is_free)
        if self._going is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._going)

    def finish(self) -> None:
        """Waits until all state is in host memory, or in the file behind it, again."""
        if self._going is not None:
            self._going.synchronize()
        if self.backing is not None:
            self.backing.finish()


@dataclass
class _Slot:
    """Memory for one piece on the device."""

    memory: Tensor
    is_free: torch.cuda.Event | None = None


class _DeviceCopy:
    """The state of one piece on the device."""

    def __init__(self, piece: StateSegment) -> None:
        self.piece = piece
        self.host = [tensor for state in piece.on_host for tensor in state.movable]
        self.nbytes = sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in self.host)
        self._device: list[Tensor] = []
        self._arrived: torch.cuda.Event | None = None

    def fetch(self, slot: _Slot, stream: torch.cuda.Stream | None) -> None:
        """Starts the copies to the device, after the piece that used the slot before has been copied out."""
        offset = 0
        for tensor in self.host:
            self._device.append(slot.memory[offset : offset + tensor.nbytes].view(tensor.dtype))
            offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        with _on(stream):
            if stream is not None and slot.is_free is not None:
                stream.wait_event(slot.is_free)
            for there, tensor in zip(self._device, self.host, strict=True):
                there.copy_(tensor, non_blocking=True)
            self._arrived = None if stream is None else stream.record_event()

    def ready(self) -> StateSegment:
        """Returns the piece with state on the device. The current stream waits for the copies."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        tensors = iter(self._device)
        return self.piece.on_device([state.moved(lambda tensor: next(tensors)) for state in self.piece.on_host])

    def send_back(self, slot: _Slot, stream: torch.cuda.Stream | None) -> None:
        """Starts the copies to the host, after the work that is queued on the current stream."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with _on(stream):
            for there, tensor in zip(self._device, self.host, strict=True):
                tensor.copy_(there, non_blocking=True)
            slot.is_free = None if stream is None else stream.record_event()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
