"""Counts the bytes of all tensors that exist, from the creation of their storage to its end."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, UntypedStorage

from megatron.core.utils.torch_private import TorchDispatchMode, tree_leaves

GRANULE = 512
"""torch's allocator on a GPU gives out multiples of this many bytes."""


@dataclass(frozen=True)
class Span:
    """A part of a forward or backward."""

    live: int
    """Bytes that exist at its end."""
    peak: int
    """The most during it."""


class Allocations(TorchDispatchMode):
    """Inside the context, counts the storages of tensors that operations return. Tensors that existed before do not
    count: parameters, gradients and inputs.

    `granule`: sizes are rounded up to a multiple of it. Only tensors on devices of type `device` count.
    """

    def __init__(self, granule: int = GRANULE, device: str = "meta") -> None:
        super().__init__()
        self.granule, self.device = granule, device
        self.live = 0
        """Bytes that exist now."""
        self.peak = 0
        """The largest value of `live` since `start` or `end_span`."""
        self.spans: list[Span] = []
        """The parts since `start`."""
        self._seen: weakref.WeakKeyDictionary[UntypedStorage, None] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        """Forgets the largest value so far, and the spans."""
        self.peak, self.spans = self.live, []

    def end_span(self) -> None:
        """Notes a span that began at the end of the one before."""
        self.spans.append(Span(self.live, self.peak))
        self.peak = self.live

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Does not count these tensors, which exist already."""
        for tensor in tensors:
            self._seen[tensor.untyped_storage()] = None

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Calls the operation and counts the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: UntypedStorage) -> None:
        if storage.device.type != self.device or storage in self._seen:
            return
        size = self._size(storage.nbytes())
        self._seen[storage] = None
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._end, size)

    def _size(self, nbytes: int) -> int:
        return -(-nbytes // self.granule) * self.granule

    def _end(self, size: int) -> None:
        self.live -= size


class HostAllocations(Allocations):
    """Counts page-locked host memory, of which torch's allocator gives out powers of two bytes."""

    def __init__(self) -> None:
        super().__init__(device="cpu")

    def _size(self, nbytes: int) -> int:
        return max(self.granule, 1 << max(nbytes - 1, 0).bit_length())
