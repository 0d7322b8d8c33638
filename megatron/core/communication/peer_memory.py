"""GPU memory that the other ranks of a group write into, without a kernel on either side.

Copy engines move the data. 32-bit words in the same memory keep the order; they only grow and are never reset. A stream
writes a word of another rank after a copy, and that rank's stream waits until the word has at least this value. The
GPU's front end does both (`cuStreamWriteValue32`, `cuStreamWaitValue32`), so neither needs a multiprocessor that a
running matrix product occupies.
"""

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.communication.collectives import holds_on_all_ranks
from megatron.core.exceptions import UserError
from megatron.core.utils.torch_private import allocate_symmetric_memory, share_symmetric_memory

WITHOUT_SHARED_MEMORY: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
"""The groups whose GPUs turned out not to share memory."""


class Lane(Protocol):
    """A queue of copies and words, which runs in parallel with the current stream."""

    def follow(self) -> None:
        """Lets later operations of the lane wait for all work of the current stream so far."""

    def lead(self) -> None:
        """Lets later work of the current stream wait for all operations of the lane so far."""

    def mark(self) -> Callable[[], None]:
        """Returns a function that lets later work of the current stream wait for the operations of the lane so far."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies a contiguous tensor into another of its shape and type."""

    def wait(self, word: int, value: int) -> None:
        """Waits until this rank's word is at least `value`."""

    def write(self, rank: int, word: int, value: int) -> None:
        """Writes a rank's word after all earlier copies of the lane are visible to that rank."""


class PeerMemory(Protocol):
    """The memory of all ranks of a group, as seen from one rank."""

    copies: Lane
    """Lane for data and the words that announce it."""
    signals: Lane
    """Lane for words, and small copies, that must not delay later copies."""

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the tensor at byte `start` of a rank's memory."""


class SymmetricMemory:
    """`PeerMemory` over torch's symmetric memory, without multicast."""

    def __init__(self, group: ProcessGroup, nbytes: int, words: int, device: torch.device) -> None:
        """All ranks of the group allocate together. Waits for the current stream, and for the other ranks.

        `nbytes` of data must be a multiple of 4. Raises UserError if the GPUs cannot access each other's memory.
        """
        assert nbytes % 4 == 0, nbytes
        self.nbytes = nbytes
        # The ranks agree before they share: a rank without memory would let the others wait for torch's timeout.
        with _on_all_ranks(group, device):
            self._own = allocate_symmetric_memory(nbytes + 4 * words, device)
            self._own[nbytes:].zero_()
        # No rank writes a word before all have zeros. Other streams may receive from ranks that wait for this one.
        torch.cuda.current_stream(device).synchronize()
        with _on_all_ranks(group, device):
            self._handle = share_symmetric_memory(self._own, group)
        self._words = [address + nbytes for address in self._handle.buffer_ptrs]
        self._views: dict[Any, Tensor] = {}
        _LIVING.add(self)
        rank = self._handle.rank
        self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        """The streams of `copies` and `signals`."""
        self.copies: Lane = _StreamLane(self.streams[0], self._words, rank)
        self.signals: Lane = _StreamLane(self.streams[1], self._words, rank)

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the tensor at byte `start`, a multiple of the type's size."""
        key = rank, start, shape, dtype
        if key not in self._views:
            self._views[key] = self._handle.get_buffer(rank, shape, dtype, start // dtype.itemsize)
        return self._views[key]


_LIVING: weakref.WeakSet[SymmetricMemory] = weakref.WeakSet()


def symmetric_bytes() -> int:
    """Returns the bytes of this process's GPU memory that other ranks reach, which torch's allocator does not count."""
    return sum(memory.nbytes for memory in _LIVING)


@contextlib.contextmanager
def _on_all_ranks(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    """At its end, raises UserError on all ranks of the group if a RuntimeError was raised inside on any of them. The
    host waits for the other ranks."""
    failure = ""
    try:
        yield
    except RuntimeError as error:
        failure = str(error).splitlines()[0]
    if not holds_on_all_ranks(not failure, group, device):
        raise UserError(
            "--tp-comm-overlap-transport symmetric-memory: GPUs of a group cannot share memory "
            f"({failure or 'another rank says why'}); process-group works between all GPUs"
        )


class _StreamLane:
    """A lane that is a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream, words: list[int], rank: int) -> None:
        self.stream = stream
        self._words, self._rank = words, rank
        """Address of the first word of each rank."""

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())

    def lead(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record(self.stream)
        return lambda: torch.cuda.current_stream().wait_event(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def wait(self, word: int, value: int) -> None:
        self._call("cuStreamWaitValue32_v2", self._rank, word, value)

    def write(self, rank: int, word: int, value: int) -> None:
        self._call("cuStreamWriteValue32_v2", rank, word, value)

    def _call(self, name: str, rank: int, word: int, value: int) -> None:
        # Flag 0: wait until (int32) (word - value) >= 0, which is right after the numbers wrap round too; and write
        # after a fence, so that earlier copies are visible before the word.
        status = getattr(_driver(), name)(self.stream.cuda_stream, self._words[rank] + 4 * word, value % 2**32, 0)
        if status:
            raise RuntimeError(f"{name} failed with error {status} of the CUDA driver")


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
        function = getattr(driver, name)
        function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        function.restype = ctypes.c_int
    return driver
