"""Activation offloading (Rhu et al. 2016, arXiv:1602.08124): copies tensors that autograd saved to host memory in
forward, and back to the device in backward.

Copies run on separate streams. A copy to the host starts as soon as the tensor is saved; the tensor's memory is freed
in stream order when a later layer joins the copy. When backward reaches a layer, the copies of the previous layer
start. The host never waits. Values are unchanged, to the bit. On a CPU the "host" is a second copy in the same memory.

Whole storages are moved, so saved tensors that share memory are moved once. A storage is moved if a `MarkedInputs`
function is called with a tensor in it; in a call with `moves_all` every storage is moved.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class OffloadLimits:
    """Limits of offloading: which storages stay on the device, and for how long."""

    min_numel: int = 0
    """Storages with fewer elements stay on the device."""
    max_in_flight: int = 1
    """Number of copies to the host, for each name, that may still run when the next one starts. The memory of this many
    more tensors is in use."""
    kept_bytes: int = 0
    """Bytes of each forward pass, counted from its first layer, that stay on the device."""


class Offloaded:
    """Wraps a function that runs a layer, called as (layers, hidden states, further inputs). Forward passes begin with
    the layer `first`; later calls belong to the same pass. A copy of the model copies the wrapper."""

    def __init__(
        self,
        run_layers: Callable[..., Tensor],
        first: nn.Module,
        limits: OffloadLimits,
        moves_all: Callable[[nn.Module], bool] | None = None,
    ) -> None:
        """`moves_all(layer)`: whether all tensors that the layer saves are moved, not only marked ones."""
        self.run_layers, self.first, self.limits, self.moves_all = run_layers, first, limits, moves_all
        self._pass = _ForwardPass()

    def __call__(self, layers: Iterable[nn.Module], *inputs: Any) -> Tensor:
        """Runs the layers and starts the copies of the tensors that they save."""
        layers = list(layers)
        if not torch.is_grad_enabled():
            return self.run_layers(layers, *inputs)
        before = None if layers[0] is self.first else self._pass.last
        region = OffloadRegion(self.limits, self._pass.in_flight, before)
        if self.moves_all is not None and self.moves_all(layers[0]):
            region.move_all_but(_tensors_in(inputs[1:]))
        self._pass.last = region
        token = _region.set(region)
        try:
            with saved_tensors_hooks(region.keep, restore_saved):
                return self.run_layers(layers, *inputs)
        finally:
            _region.reset(token)
            region.close()


@dataclass(frozen=True)
class MarkedInputs:
    """Wraps a function whose tensor arguments are moved if autograd saves them before, during or after the call. With
    `and_saved`, all tensors that are saved during the call are moved too, such as 8-bit copies of the arguments."""

    function: Callable[..., Any]
    name: str
    and_saved: bool = False

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Calls the function."""
        region = _region.get()
        if region is None:
            return self.function(*inputs, **keywords)
        with region.marked(self.name, _tensors_in((*inputs, *keywords.values())), self.and_saved):
            return self.function(*inputs, **keywords)


def keep_saved(tensor: Tensor) -> object:
    """Returns the object to keep instead of a tensor that backward needs. For code with its own saved-tensor hooks,
    which hide those of `Offloaded`."""
    region = _region.get()
    return tensor if region is None else region.keep(tensor)


def restore_saved(kept: object) -> Any:
    """Returns the tensor for which `keep_saved` returned this. On CUDA, the current stream waits for its copy."""
    return kept.tensor() if isinstance(kept, SavedView) else kept


class OffloadRegion:
    """One call of a layer: the storages that it saved, and the state of their copies."""

    def __init__(self, limits: OffloadLimits, in_flight: "_InFlight", before: "OffloadRegion | None") -> None:
        self.limits, self.in_flight, self.before = limits, in_flight, before
        self.bytes_to_keep: int = limits.kept_bytes if before is None else before.bytes_to_keep
        self._saved: dict[int, SavedStorage] = {}
        """Storages by address. Addresses are unique until the region is closed, because the storages stay allocated
        until then."""
        self._marks: dict[int, str] = {}
        self._name: str | None = None
        """The name under which all storages are moved at present."""
        self._unmoved: set[int] = set()
        self._moved: list[weakref.ref[SavedStorage]] = []
        self._is_reloaded = False

    def move_all_but(self, tensors: Iterable[Tensor]) -> None:
        """Moves every storage that is saved, except those of `tensors`, which other layers use too."""
        self._name, self._unmoved = "layer", {_address(tensor) for tensor in tensors}

    @contextlib.contextmanager
    def marked(self, name: str, tensors: Iterable[Tensor], and_saved: bool) -> Iterator[None]:
        """Moves these tensors, if they were saved or are saved within the context."""
        added, outer = [], self._name
        for tensor in tensors:
            saved = self._saved.get(_address(tensor))
            if saved is not None:
                self._move(saved, name)
            elif _address(tensor) not in self._marks:
                self._marks[_address(tensor)] = name
                added.append(_address(tensor))
        if and_saved and outer is None:
            self._name = name
        try:
            yield
        finally:
            self._name = outer
            for address in added:
                del self._marks[address]

    def keep(self, tensor: Tensor) -> object:
        """Returns a view of the tensor's storage, and moves the storage if it is marked. Returns weights and tensors of
        special kinds as they are."""
        if not _is_movable(tensor):
            return tensor
        address = _address(tensor)
        saved = self._saved.get(address)
        if saved is None:
            saved = self._saved[address] = SavedStorage(self, tensor)
        name = self._marks.get(address, None if address in self._unmoved else self._name)
        if name is not None:
            self._move(saved, name)
        return SavedView(saved, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _move(self, saved: "SavedStorage", name: str) -> None:
        if saved.is_decided or saved.numel < self.limits.min_numel:
            return
        saved.is_decided = True
        if self.bytes_to_keep >= saved.nbytes:
            self.bytes_to_keep -= saved.nbytes
            return
        self._moved.append(weakref.ref(saved))
        saved.start_offload()
        self.in_flight.add(name, saved, self.limits.max_in_flight)

    def close(self) -> None:
        """Ends the call: no storage is added after this. Only now can storages of this layer be freed."""
        self._saved.clear()
        self.in_flight.end_layer(self.limits.max_in_flight)

    def reload_ahead(self) -> None:
        """Starts the copies to the device of this layer, if they have not started, and of the layer before it."""
        if not self._is_reloaded:
            self._is_reloaded = True
            self._reload()
            if self.before is not None:
                self.before._reload()

    def _reload(self) -> None:
        for reference in reversed(self._moved):
            saved = reference()
            if saved is not None:
                saved.start_reload()


class SavedStorage:
    """A storage that autograd saved: on the device, being copied, or in host memory."""

    def __init__(self, region: OffloadRegion, tensor: Tensor) -> None:
        self.region, self.device = region, tensor.device
        self.nbytes = tensor.untyped_storage().nbytes()
        self.numel = self.nbytes // tensor.element_size()
        self.is_decided = False
        """Whether the storage is moved; otherwise it stays on the device."""
        self.copied: torch.cuda.Event | None = None
        """Ends the copy to the host."""
        self._storage: UntypedStorage | None = tensor.untyped_storage()
        self._host: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        """Ends the copy to the device."""
        self._is_wanted = False
        """Backward needs the storage soon, so it is not freed."""
        self._is_awaited = False
        """A stream has waited for the copy to the device."""

    def start_offload(self) -> None:
        """Starts the copy to the host. The memory on the device stays until `release`."""
        assert self._storage is not None
        source = _bytes_of(self._storage, self.device)
        self._host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self.copied = _copy(self._host, source, self.device, "to the host")

    def release(self) -> None:
        """Frees the memory on the device, unless backward needs it soon. On CUDA, the current stream must have waited
        for `copied`."""
        if not self._is_wanted:
            self._storage = None

    def start_reload(self) -> None:
        """Starts the copy to the device, unless the storage is there."""
        self._is_wanted = True
        if self._storage is None:
            assert self._host is not None
            target = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            self._arrived = _copy(target, self._host, self.device, "to the device")
            self._storage = target.untyped_storage()

    def on_device(self) -> UntypedStorage:
        """Returns the storage. On CUDA, the current stream waits for its copy."""
        self.region.reload_ahead()
        self.start_reload()
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
            self._is_awaited = True
        assert self._storage is not None
        return self._storage

    def __del__(self) -> None:
        # A copy that no stream waits for must not write to memory that has been reused in the meantime.
        if self._arrived is not None and not self._is_awaited:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)


@dataclass(frozen=True)
class SavedView:
    """A saved tensor as a view of a storage."""

    storage: SavedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Returns the tensor, on its device."""
        empty = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return empty.set_(self.storage.on_device(), self.offset, self.shape, self.stride)  # type: ignore[call-overload]


class _InFlight:
    """Copies to the host that are not joined yet, oldest first: a queue for each name, with an entry for each layer."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, deque[_Group]] = defaultdict(deque)
        self._layer = 0
        """Number of layers that have been run, in all passes."""

    def add(self, name: str, saved: SavedStorage, limit: int) -> None:
        """Adds a copy, and joins all copies of this name except those of the last `limit` layers."""
        groups = self._groups[name]
        if not groups or groups[-1].layer != self._layer:
            groups.append(_Group(self._layer))
        groups[-1].members.append(weakref.ref(saved))
        while len(groups) > max(limit, 1):  # storages of the layer in progress stay until it ends
            groups.popleft().join()

    def end_layer(self, limit: int) -> None:
        """Joins the copies of all layers except the last `limit`."""
        self._layer += 1
        for groups in self._groups.values():
            while groups and groups[0].layer < self._layer - limit:
                groups.popleft().join()

    def __deepcopy__(self, memo: dict[int, object]) -> "_InFlight":
        return _InFlight()


@dataclass
class _Group:
    layer: int
    members: "list[weakref.ref[SavedStorage]]" = field(default_factory=list)

    def join(self) -> None:
        """Makes the current stream wait for the copies, and frees their sources."""
        for reference in self.members:
            saved = reference()
            if saved is not None:
                if saved.copied is not None:
                    torch.cuda.current_stream(saved.device).wait_event(saved.copied)
                saved.release()


class _ForwardPass:
    """The forward pass of a stack of layers that is in progress."""

    def __init__(self) -> None:
        self.in_flight = _InFlight()
        self.last: OffloadRegion | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "_ForwardPass":
        return _ForwardPass()


_region: ContextVar[OffloadRegion | None] = ContextVar("layer whose saved tensors are offloaded", default=None)


def _copy(target: Tensor, source: Tensor, device: torch.device, direction: str) -> torch.cuda.Event | None:
    """Copies bytes. On CUDA the copy runs on a stream for its direction, after the work queued on the current stream,
    and an event is returned that marks its end."""
    if device.type != "cuda":
        target.copy_(source)
        return None
    stream = _stream(device, direction)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return stream.record_event()


@functools.cache
def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload]


def _is_movable(tensor: Tensor) -> bool:
    """Whether a saved tensor is an activation with its own memory (weights are not)."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return False
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return is_plain and tensor.device.type in ("cpu", "cuda") and tensor.untyped_storage().nbytes() > 0


def _tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yields the tensors in these values, also those inside records and sequences."""
    for value in values:
        if isinstance(value, Tensor):
            if _is_movable(value):
                yield value
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _tensors_in(getattr(value, field.name) for field in dataclasses.fields(value))
