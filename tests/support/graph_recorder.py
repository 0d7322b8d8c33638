"""Captures functions on a CPU as a CUDA graph does on a GPU: a list of operations with the memory that they use.

`OperationRecorder.capture` notes each torch operation with its inputs and outputs, and undoes what it wrote into
memory that existed before. A replay runs the operations again on the same memory; no Python of the function runs. So
numbers of the host are constants, and hooks do not run, as on a GPU. What waits for the device, and so cannot be
captured on a GPU, is an error here too: reading a value, and shapes that depend on values.
"""

from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from megatron.core.utils.graph_capture import CapturedGraph
from megatron.core.utils.torch_private import TorchDispatchMode, tree_leaves

T = TypeVar("T")

REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")


class OperationRecorder:
    """A `GraphRecorder` for tests on a CPU. Counts what it was asked for."""

    def __init__(self) -> None:
        self.warmed, self.captured, self.replayed = 0, 0, 0

    def warm_up(self, function: Callable[[], T]) -> T:
        self.warmed += 1
        return function()

    def capture(self, function: Callable[[], T]) -> CapturedGraph[T]:
        self.captured += 1
        tape = _Tape()
        with tape, mock.patch.object(Tensor, "tolist", _refuse_to_wait):  # it is no operation
            outputs = function()
        tape.undo()

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return CapturedGraph(outputs, replay)


class _Tape(TorchDispatchMode):  # type: ignore[misc]
    """The operations of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.own: set[int] = set()
        """Addresses of memory that the function allocated."""
        self.before: list[tuple[Tensor, Tensor]] = []
        """What other memory held before the function wrote to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in REFUSED:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        written = [
            tensor
            for argument, value in zip(func._schema.arguments, self._values(func, args, kwargs), strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value)
            if isinstance(tensor, Tensor)
        ]
        for tensor in written:
            if tensor.untyped_storage().data_ptr() not in self.own:
                self.before.append((tensor, tensor.detach().clone()))
        result = func(*args, **kwargs)
        given = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        fresh = [t for t in tree_leaves(result) if isinstance(t, Tensor) and _address(t) not in given]
        self.own |= {_address(tensor) for tensor in fresh}
        if fresh or written:
            self.operations.append((func, args, kwargs, result))
        return result

    @staticmethod
    def _values(func: Any, args: Any, kwargs: Any) -> list[Any]:
        names = [argument.name for argument in func._schema.arguments]
        return [*args, *(kwargs.get(name) for name in names[len(args) :])]

    def undo(self) -> None:
        with torch.no_grad():
            for tensor, values in reversed(self.before):
                tensor.copy_(values)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self.operations:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and _address(old) != _address(new):
                        old.copy_(new)


def _refuse_to_wait(tensor: Tensor) -> None:
    raise RuntimeError("tolist: operation not permitted when stream is capturing")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
