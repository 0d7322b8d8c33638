"""Sharded weights in a file of a local disk, as in ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857).

The shards of the last units that were used are in memory. A shard comes in when its unit is gathered, updated, saved or
loaded, and the one that was used longest ago goes out. Threads read the shard of the next unit into a page-locked
buffer while the device computes, and write changed shards back from such buffers.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.utils.scratch_file import BLOCK, ScratchFile, aligned_memory, padded

IN_MEMORY = 2
"""Shards on the device: one is used, and one is gathered ahead."""
BUFFERS = 3
"""Shards in host memory: two are read ahead, and one is written."""
FLAG = "--param-nvme-offload-path"


def device_bytes(sizes: Sequence[int]) -> int:
    """Returns the largest number of bytes on the device of shards of these sizes."""
    return sum(sorted(sizes)[-IN_MEMORY:])


def buffer_bytes(sizes: Sequence[int]) -> int:
    """Returns the bytes of the buffers in host memory for shards of these sizes."""
    return BUFFERS * (padded(max(sizes)) + BLOCK) if sizes else 0


@dataclass(eq=False)
class _Buffer:
    """Host memory for one shard."""

    memory: Tensor
    work: Future[None] | None = None
    """The read or write that uses it."""
    copied: torch.cuda.Event | None = None
    """The end of the copy from it to the device."""
    is_taken: bool = False
    """Whether it has a shard that was read and that no one has copied yet."""


class WeightFile:
    """The file of one model chunk on one rank. Raises UserError as `ScratchFile` does."""

    def __init__(self, folder: str, rank: int, device: torch.device, largest: int) -> None:
        """`largest` is the size of the largest shard, in bytes."""
        self.file = ScratchFile(folder, rank, FLAG, "weights")
        self.device = device
        self.in_memory: list[FileShard] = []
        """The shards that have memory. The one that was used last is the last."""
        self.buffers = [_Buffer(aligned_memory(padded(largest), device.type == "cuda")) for _ in range(BUFFERS)]
        # A read that waits for a write was submitted after it, so the write runs already or has ended.
        self._threads = ThreadPoolExecutor(2, "weight file")
        self._failure: BaseException | None = None

    def submit(self, transfer: Callable[[], None]) -> Future[None]:
        """Reads or writes on a thread. The first exception is kept: an update that ended half way must not be saved."""

        def run() -> None:
            try:
                transfer()
            except BaseException as error:
                self._failure = self._failure or error
                raise

        return self._threads.submit(run)

    def raise_failure(self) -> None:
        """Raises the first exception of the disk, if there was one."""
        if self._failure is not None:
            raise self._failure

    def buffer(self) -> _Buffer:
        """Returns the buffer that has been free for longest, after the work that used it. Raises UserError if the disk
        has failed."""
        self.raise_failure()
        buffer = next(each for each in self.buffers if not each.is_taken)
        self.buffers.remove(buffer)
        self.buffers.append(buffer)
        if buffer.work is not None:
            buffer.work.result()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        buffer.work = buffer.copied = None
        return buffer

    def event(self) -> torch.cuda.Event | None:
        """Returns the end of the work that is queued on the device."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


class FileShard:
    """A shard in a file. Its tensor stays the same and has memory only while the shard is in memory."""

    def __init__(self, store: WeightFile, tensor: Tensor, before_release: Callable[[], None]) -> None:
        """`tensor` has the numbers. `before_release` ends what reads its memory."""
        self.store, self.tensor, self._before_release = store, tensor, before_release
        self.nbytes = tensor.nbytes
        self.offset = store.file.reserve(self.nbytes)
        self._ahead: _Buffer | None = None
        self._written: Future[None] | None = None
        self.is_changed = True
        """Whether the file has other numbers."""
        self._make_room()
        store.in_memory.append(self)

    @property
    def is_in_memory(self) -> bool:
        """Whether the tensor has memory."""
        return self in self.store.in_memory

    def read_ahead(self) -> None:
        """Starts to read the shard, unless it is in memory or only one buffer is free, which writes need."""
        free = sum(not buffer.is_taken for buffer in self.store.buffers)
        if free > 1 and self._ahead is None and not self.is_in_memory:
            self._start_read()

    def fetch(self, changes: bool = False) -> None:
        """Gives the tensor memory and its numbers until other shards are fetched. `changes`: the caller writes to it.
        Raises UserError if the disk fails."""
        self.store.raise_failure()
        if self.is_in_memory:
            self.store.in_memory.remove(self)
        else:
            self._make_room()
            buffer = self._ahead or self._start_read()
            assert buffer.work is not None
            buffer.work.result()
            self.tensor.untyped_storage().resize_(self.nbytes)
            self.tensor.copy_(self._numbers_in(buffer), non_blocking=True)
            buffer.copied, buffer.is_taken, self._ahead = self.store.event(), False, None
        self.store.in_memory.append(self)
        self.is_changed |= changes

    def release(self) -> None:
        """Frees the tensor's memory, if it has any, and starts to write its numbers to the file if they changed."""
        if not self.is_in_memory:
            return
        self._before_release()
        if self.is_changed:
            buffer = self.store.buffer()
            self._numbers_in(buffer).copy_(self.tensor, non_blocking=True)
            write = functools.partial(self._write, buffer.memory, self.store.event())
            self._written = buffer.work = self.store.submit(write)
        self.is_changed = False
        self.tensor.untyped_storage().resize_(0)
        self.store.in_memory.remove(self)

    def _make_room(self) -> None:
        while len(self.store.in_memory) >= IN_MEMORY:
            self.store.in_memory[0].release()

    def _numbers_in(self, buffer: _Buffer) -> Tensor:
        return buffer.memory[: self.nbytes].view(self.tensor.dtype)

    def _start_read(self) -> _Buffer:
        self._ahead = buffer = self.store.buffer()
        buffer.is_taken = True
        buffer.work = self.store.submit(functools.partial(self._read, buffer.memory, self._written))
        return buffer

    def _read(self, memory: Tensor, written: Future[None] | None) -> None:
        if written is not None:
            written.result()
        self.store.file.read(self.offset, memory[: padded(self.nbytes)])

    def _write(self, memory: Tensor, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        self.store.file.write(self.offset, memory[: padded(self.nbytes)])
