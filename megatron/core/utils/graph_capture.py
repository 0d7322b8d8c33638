"""CUDA graphs behind a small interface: the captured function, its inputs at fixed addresses, its outputs.

A graph is the list of kernels of one run of a function, with the addresses that they read and write. A replay launches
all of them at once; no Python runs. Code that uses graphs takes a `GraphRecorder`, so that tests on a CPU can replace
`CudaGraphRecorder`.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.utils.gpu_memory import is_lack_of_gpu_memory
from megatron.core.utils.torch_private import end_allocation_to_pool

T = TypeVar("T")


@dataclass(frozen=True)
class CapturedGraph(Generic[T]):
    """A captured function."""

    outputs: T
    """The result of the function during the capture. Each replay writes its tensors again."""
    replay: Callable[[], None]
    """Runs the function's kernels once more, on the current stream. The host does not wait."""


class GraphRecorder(Protocol):
    """Captures functions as graphs."""

    def warm_up(self, function: Callable[[], T]) -> T:
        """Returns function(), run with the stream and the thread of `capture`. The first runs of a function compile and
        tune kernels and allocate workspaces of libraries; they must not be captured."""

    def capture(self, function: Callable[[], T]) -> CapturedGraph[T]:
        """Captures the kernels of function() without running them. The function's Python code runs once, now. Memory
        that existed before must keep its address as long as the graph is replayed. Raises RuntimeError if the function
        waits for the device."""


class TensorRecord(Protocol):
    """Keeps tensors that a micro-batch computes in addition to its loss, such as the metrics of a layer."""

    def take_tensors(self) -> Any:
        """Returns the tensors recorded since the last call, and discards them."""

    def add_tensors(self, tensors: Any) -> None:
        """Appends the tensors that `take_tensors` returned for one micro-batch to the record."""


class CudaGraphRecorder:
    """Captures on a separate stream. All graphs share one memory pool, because only one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], T]) -> T:
        """Returns function(), run on the stream of captures."""
        caller = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            result = function()
        caller.wait_stream(self.stream)
        return result

    def capture(self, function: Callable[[], T]) -> CapturedGraph[T]:
        """Captures function() as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (heartbeats, pinned memory of the loader) may call CUDA meanwhile: thread_local.
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local")
        try:
            with undoing_a_failed_capture(self.stream.device, self._pool), capturing:
                outputs = function()
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # torch may not have given back that of the failed capture
            raise
        return CapturedGraph(outputs, graph.replay)


@contextmanager
def undoing_a_failed_capture(device: torch.device, pool: object) -> Iterator[None]:
    """Returns a context for a capture. If the capture fails, everything in this process works afterwards as before.

    When CUDA rejects a captured stream, torch stops in the middle of ending the capture. The stream of the capture
    stays the current one, the allocator keeps `pool` for it, and in older releases the default generator of random
    numbers refuses every later draw ("Offset increment outside graph capture"). A capture of one kernel, which ends
    well, lets the same generator draw again; graphs that drew from it before the failure still can.
    """
    before = torch.cuda.current_stream(device)
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):  # of a capture that torch has ended
            end_allocation_to_pool(device, pool)
        with suppress(RuntimeError):  # the first error is the one to report
            _capture_one_kernel(device)
        raise


def _capture_one_kernel(device: torch.device) -> None:
    stream = torch.cuda.Stream(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


@dataclass(eq=False)
class StepGraphs:
    """The common part of all graphs of a run's training steps: how they are captured, and the number of the step."""

    recorder: GraphRecorder
    warmup_steps: int
    """Steps that run eagerly before a capture, at least 1."""
    records: Sequence[TensorRecord] = ()
    """Records of tensors that a micro-batch computes in addition to its loss. In a replay they get the tensors of the
    capture, with new values."""
    before_capture: Callable[[str], None] = lambda sentence: None
    """Called with a sentence before graphs are captured; may raise UserError."""
    before_step: Callable[[], Hashable] = lambda: None
    """Called before the micro-batches of each training step. It updates the values that graphs read at fixed addresses,
    and returns the values that a graph depends on in addition to the micro-batch."""
    step: int = field(default=0, init=False)
    """Number of training steps begun."""
    _state: Hashable = field(default=None, init=False)
    """The result of `before_step` for the current step."""

    def begin_step(self) -> None:
        """Begins a training step."""
        self.step += 1
        self._state = self.before_step()


@contextmanager
def capture_errors(what: str, cause: str) -> Iterator[None]:
    """Returns a context in which `what` is captured. A failure becomes a UserError that names `cause` as a possible
    reason; an error that says that the GPU is full is not changed."""
    try:
        yield
    except RuntimeError as error:
        if is_lack_of_gpu_memory(error):
            raise
        reason = str(error).strip().splitlines() or ["no reason given"]
        raise UserError(
            f"CUDA graphs: {what} cannot be captured: {reason[0]}. {cause} that waits for the device (item(), "
            "tolist(), print) or copies from ordinary host memory does not fit into a graph; fix it, or leave out "
            "CUDA graphs"
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Nested values: tensors in dictionaries, lists, tuples and dataclasses

HOST_ENTRIES = frozenset({"sample_ids"})
"""Names of entries of a batch that stay on the host and that no graph reads."""


class StaticInputs:
    """A copy of a nested value whose tensors are on the device and keep their addresses."""

    def __init__(self, example: Any, device: torch.device) -> None:
        self.value = map_tensors(lambda tensor: torch.empty_like(tensor, device=device), without_host_entries(example))
        self._tensors = [leaf for _, leaf in leaves(self.value) if isinstance(leaf, Tensor)]

    def fill(self, value: object) -> None:
        """Copies the tensors of a value with the `signature` of the example. The host does not wait."""
        _fill(self._tensors, value)


def fill_nested(target: object, value: object) -> None:
    """Copies the tensors of a nested value into those of another value with the same structure. The host does not
    wait."""
    _fill([leaf for _, leaf in leaves(target) if isinstance(leaf, Tensor)], value)


def _fill(targets: Sequence[Tensor], value: object) -> None:
    given = [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]
    for target, tensor in zip(targets, given, strict=True):
        if target.data_ptr() != tensor.data_ptr():
            target.copy_(tensor, non_blocking=True)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a nested value with their paths, without entries named in `HOST_ENTRIES`."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        yield path, value
        return
    for name, item in items:
        if name not in HOST_ENTRIES:
            yield from leaves(item, f"{path}.{name}" if path else str(name))


def signature(value: object) -> Hashable:
    """Returns the properties of a nested value that a graph depends on: shapes and types of tensors, and all other
    leaves."""
    return tuple(
        (path, (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves(value)
    )


def without_host_entries(value: object) -> object:
    """Returns a nested value with None in place of the entries named in `HOST_ENTRIES`."""
    return _mapped(value, lambda leaf: leaf, lambda name: name in HOST_ENTRIES)


def map_tensors(function: Callable[[Tensor], Tensor], value: T) -> T:
    """Returns a nested value with function(tensor) in place of each tensor."""
    return _mapped(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, lambda name: False)


def _mapped(value: Any, function: Callable[[object], object], drops: Callable[[object], bool]) -> Any:
    def each(name: object, item: object) -> Any:
        return None if drops(name) else _mapped(item, function, drops)

    if isinstance(value, Mapping):
        return {name: each(name, item) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each(name, item) for name, item in zip(value._fields, value, strict=True)))
    if isinstance(value, list | tuple):
        return type(value)(each(number, item) for number, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: each(name, getattr(value, name)) for name in names})
    return function(value)
