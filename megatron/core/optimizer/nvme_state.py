"""Optimizer state in a file of a local disk, as in ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857).

The update goes through the state piece by piece. A thread reads the next pieces into page-locked buffers and another
writes updated ones back, while the device copies and updates the pieces between them. The file is scratch: checkpoints
hold the state, as for any other run.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.optimizer import host_state
from megatron.core.optimizer.segments import StateSegment
from megatron.core.optimizer.state_storage import StateTensor
from megatron.core.utils.scratch_file import BLOCK, ScratchFile, aligned_memory, padded

BUFFERS = 4
"""Pieces in host memory: one is read ahead, one is copied to the device, one is copied back, one is written."""


@dataclass(frozen=True)
class _Block:
    """Elements [start, stop) of a tensor, at an offset of the file."""

    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class FileTensor:
    """A flat tensor in blocks of a file."""

    file: ScratchFile
    dtype: torch.dtype
    blocks: tuple[_Block, ...]

    def read(self, start: int, stop: int) -> Tensor:
        """Returns the elements [start, stop), in host memory."""
        found = torch.empty(stop - start, dtype=self.dtype)
        for block in self._between(start, stop):
            first, end = max(start, block.start), min(stop, block.stop)
            values = self._load(block)[1]
            found[first - start : end - start] = values[first - block.start : end - block.start]
        return found

    def write(self, start: int, values: Tensor) -> None:
        """Replaces the elements from `start` on."""
        for block in self._between(start, start + values.numel()):
            first, end = max(start, block.start), min(start + values.numel(), block.stop)
            memory, stored = self._load(block)
            stored[first - block.start : end - block.start] = values[first - start : end - start]
            self.file.write(block.offset, memory)

    def _between(self, start: int, stop: int) -> Iterator[_Block]:
        return (block for block in self.blocks if max(start, block.start) < min(stop, block.stop))

    def _load(self, block: _Block) -> tuple[Tensor, Tensor]:
        """Returns the bytes of a block, and the elements in them."""
        nbytes = (block.stop - block.start) * self.dtype.itemsize
        memory = aligned_memory(padded(nbytes))
        self.file.read(block.offset, memory)
        return memory, memory[:nbytes].view(self.dtype)


@dataclass(frozen=True)
class InFile:
    """State whose movable tensors are in a file."""

    template: StateTensor
    """The state with movable tensors on the meta device. Their storage offsets tell the place in `tensors`."""
    tensors: tuple[FileTensor, ...]

    @property
    def main(self) -> torch.dtype:
        """The main type."""
        return self.template.main

    def decode(self) -> Tensor:
        """Returns a copy of the numbers in the main type."""
        tensors = iter(self.tensors)
        return self.template.moved(lambda meta: next(tensors).read(*_place(meta))).decode()

    def encode(self, values: Tensor, skip: Tensor | None = None) -> None:
        """Stores numbers of the main type, rounded."""
        assert skip is None, "steps update the pieces in buffers"
        new = self.template.moved(lambda meta: torch.empty_like(meta, device="cpu"))
        new.encode(values)
        for tensor, meta, stored in zip(self.tensors, self.template.movable, new.movable, strict=True):
            tensor.write(int(meta.storage_offset()), stored)

    def part(self, start: int, stop: int) -> "InFile":
        """Returns the elements [start, stop) in the same file."""
        return InFile(self.template.part(start, stop), self.tensors)

    @property
    def movable(self) -> tuple[Tensor, ...]:
        """The tensors in the file, without numbers."""
        return self.template.movable

    def moved(self, move: Callable[[Tensor], Tensor]) -> StateTensor:
        """Returns the state with each tensor in the file replaced by `move(tensor)`."""
        return self.template.moved(move)


def kept_as(state: StateTensor) -> StateTensor:
    """Returns a state of the class that says how the numbers are kept, also for one in a file."""
    return state.template if isinstance(state, InFile) else state


def in_file(file: ScratchFile, state: StateTensor, numel: int) -> InFile:
    """Writes a state of `numel` elements to the file, in the blocks in which `FileStream` reads it."""
    template = state.moved(lambda tensor: torch.empty_like(tensor, device="meta"))
    parts = [[_place(meta) for meta in part.movable] for part in _pieces(template, numel)]
    tensors = []
    for number, tensor in enumerate(state.movable):
        blocks, places = [], [places[number] for places in parts]
        sizes = [(stop - start) * tensor.element_size() for start, stop in places]
        offset = file.reserve(sum(map(padded, sizes)))
        for (start, stop), nbytes in zip(places, sizes, strict=True):
            memory = aligned_memory(padded(nbytes)).zero_()
            memory[:nbytes].view(tensor.dtype).copy_(tensor[start:stop])
            file.write(offset, memory)
            blocks.append(_Block(start, stop, offset))
            offset += padded(nbytes)
        tensors.append(FileTensor(file, tensor.dtype, tuple(blocks)))
    return InFile(template, tuple(tensors))


def piece_bytes(states: Sequence[StateTensor], numel: int) -> list[int]:
    """Returns the bytes of each piece of a unit's shard in file and buffers. `states` have `numel` elements and may be
    on the meta device."""
    pieces = zip(*(_pieces(state, numel) for state in states), strict=True)
    return [sum(padded(tensor.nbytes) for part in parts for tensor in part.movable) for parts in pieces]


def buffer_bytes(pieces: Sequence[int]) -> int:
    """Returns the bytes of the buffers in host memory for pieces of these sizes."""
    return len(pieces[:BUFFERS]) * (max(pieces, default=0) + BLOCK)


def _pieces(state: StateTensor, numel: int) -> Iterator[StateTensor]:
    size = host_state.PIECE
    return (state.part(first, min(first + size, numel)) for first in range(0, numel, size))


def _place(meta: Tensor) -> tuple[int, int]:
    return int(meta.storage_offset()), int(meta.storage_offset()) + meta.numel()


# ---------------------------------------------------------------------------------------------------------------------
# The update


@dataclass(frozen=True)
class _Transfer:
    """A block of the file and its place in a buffer."""

    offset: int
    memory: Tensor


class FileStream:
    """Moves pieces between the file and buffers in host memory, each always in the same buffer."""

    def __init__(self, file: ScratchFile, pieces: Sequence[StateSegment], pinned: bool) -> None:
        """`pieces` have their state in the file."""
        self.file = file
        sizes = [sum(padded(tensor.nbytes) for state in piece.on_host for tensor in state.movable) for piece in pieces]
        self.buffers = [aligned_memory(max(sizes), pinned) for _ in pieces[:BUFFERS]]
        self._transfers: list[list[_Transfer]] = []
        self.pieces = [self._in_buffer(piece, self.buffers[n % BUFFERS]) for n, piece in enumerate(pieces)]
        """The pieces with their state in the buffers."""
        self._reader = ThreadPoolExecutor(1, "optimizer state reader")
        self._writer = ThreadPoolExecutor(1, "optimizer state writer")
        self._reads: dict[int, Future[None]] = {}
        self._writes: dict[int, Future[None]] = {}
        """The last write from each buffer. The writes before it have ended when it has."""
        self._failure: BaseException | None = None

    def _in_buffer(self, piece: StateSegment, buffer: Tensor) -> StateSegment:
        transfers, used = [], 0
        states = []
        for state in piece.on_host:
            assert isinstance(state, InFile), state
            views = []
            for meta, tensor in zip(state.movable, state.tensors, strict=True):
                place = _place(meta)
                block = next(block for block in tensor.blocks if (block.start, block.stop) == place)
                transfers.append(_Transfer(block.offset, buffer[used : used + padded(meta.nbytes)]))
                views.append(buffer[used : used + meta.nbytes].view(meta.dtype))
                used += padded(meta.nbytes)
            rest = iter(views)
            states.append(state.moved(lambda meta, rest=rest: next(rest)))  # type: ignore[misc]
        self._transfers.append(transfers)
        return piece.on_device(states)

    def begin(self) -> None:
        """Starts to read the first pieces."""
        for number in range(len(self.buffers)):
            self._read_ahead(number)

    def arrive(self, number: int) -> None:
        """Waits until a piece is in its buffer. Raises UserError if the disk has failed."""
        self._reads.pop(number).result()
        self._raise_failure()

    def leave(self, number: int, copied: torch.cuda.Event | None) -> None:
        """Starts to write a piece after the event that ends its copy to the buffer, and then to read the next one for
        this buffer."""
        self._writes[number % BUFFERS] = self._writer.submit(self._write, number, copied)
        if number + BUFFERS < len(self.pieces):
            self._read_ahead(number + BUFFERS)

    def finish(self) -> None:
        """Waits until all pieces are in the file. Raises UserError if the disk has failed since the state began."""
        for write in self._writes.values():
            write.result()
        self._raise_failure()

    def _read_ahead(self, number: int) -> None:
        written = self._writes.get(number % BUFFERS)
        self._reads[number] = self._reader.submit(self._read, number, written)

    def _read(self, number: int, written: Future[None] | None) -> None:
        if written is not None:
            written.result()
        with self._noting_failure():
            for transfer in self._transfers[number]:
                self.file.read(transfer.offset, transfer.memory)

    def _write(self, number: int, copied: torch.cuda.Event | None) -> None:
        with self._noting_failure():
            if copied is not None:
                copied.synchronize()
            for transfer in self._transfers[number]:
                self.file.write(transfer.offset, transfer.memory)

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Keeps the first exception: an update that ended half way must not be saved."""
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or error
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
