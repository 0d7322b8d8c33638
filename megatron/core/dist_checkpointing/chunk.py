"""The unit of a checkpoint: a range of a canonical tensor's elements, and the memory on this rank that holds them."""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.core.parameters import Box, ParameterInfo, canonical_names, info_of

MASTER = "param"
"""Kind of the optimizer state that is the full-precision copy of the weight (main weight)."""

AVERAGE = "ema"
"""Kind of the optimizer state that is the moving average of the weight (--ema-decay)."""

SCALING_STATE = "*.scaling.amax_history"
"""Pattern of names: the largest values that delayed scaling of fp8 has recorded. A run may switch fp8 on or off at any
checkpoint: a missing record starts empty, and a record that no rank reads is ignored."""

_OPTIMIZER_PREFIX = "optimizer."


class EncodedTensor(Protocol):
    """Memory that holds numbers in another form than a tensor of their type, such as float16 with scales."""

    def decode(self) -> Tensor:
        """Returns the numbers, one-dimensional."""

    def encode(self, values: Tensor) -> None:
        """Stores the numbers."""


@dataclass(frozen=True)
class EncodedPart:
    """A range of the numbers of an `EncodedTensor`, for reading."""

    whole: EncodedTensor
    begin: int
    end: int

    def decode(self) -> Tensor:
        """Returns the numbers of the range."""
        return self.whole.decode()[self.begin : self.end]

    def encode(self, values: Tensor) -> None:
        """Raises AssertionError: only whole tensors are loaded."""
        raise AssertionError("a part of an encoded tensor is loaded")


@dataclass(frozen=True, eq=False)
class Chunk:
    """A range of a canonical tensor's elements, and the tensor on this rank that holds them.

    `box` is a rectangular part of the canonical tensor `name`, which has shape `global_shape`. The elements of the box
    are numbered in row-major order. The chunk consists of the elements [begin, end) of this numbering (`flat_range`),
    or of the whole box if `flat_range` is None. `tensor` holds exactly these elements, contiguous and in this order.
    Its shape does not matter; its dtype is the dtype on disk. Saving reads `tensor`. Loading writes into it in place,
    so it must be the memory in use: a view of a flat buffer works, a copy does not. Padding belongs to no chunk.

    `holders` are the global ranks that hold the same values of the same chunk, in ascending order: all data parallel
    ranks for a replicated weight, one rank for a range of a sharded optimizer (or several, if shards have replicas).
    The saving rank is one of them; empty means this rank alone. All ranks of a set must list the same chunks with this
    set, since they divide the writing among themselves without communication.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    flat_range: tuple[int, int] | None
    tensor: Tensor
    holders: tuple[int, ...] = ()
    encoded: EncodedTensor | None = None

    def __post_init__(self) -> None:
        shape, box = self.global_shape, self.box
        assert len(shape) == len(box.start) == len(box.shape), self
        assert all(b >= 0 and b + n <= size for b, n, size in zip(box.start, box.shape, shape, strict=True)), self
        begin, end = self.range
        assert 0 <= begin <= end <= box.numel, self
        assert self.tensor.numel() == end - begin and self.tensor.is_contiguous(), self
        assert all(a < b for a, b in zip(self.holders, self.holders[1:], strict=False)), self

    def __repr__(self) -> str:
        return f"Chunk({self.name}, {self.global_shape}, {self.box}, {self.flat_range}, {tuple(self.tensor.shape)})"

    @property
    def range(self) -> tuple[int, int]:
        """First element and end in the row-major numbering of the box."""
        return self.flat_range if self.flat_range is not None else (0, self.box.numel)

    @property
    def flat(self) -> Tensor:
        """The chunk's elements as a one-dimensional view of `tensor`."""
        # Not view(-1), which keeps the stride of a single element; `view(dtype)` later needs stride 1.
        return self.tensor.detach().as_strided((self.tensor.numel(),), (1,))

    def part(self, begin: int, end: int) -> "Chunk":
        """Returns the chunk of the elements [begin, end), counted from this chunk's first element."""
        first = self.range[0]
        encoded = None if self.encoded is None else EncodedPart(self.encoded, begin, end)
        cut = self.flat[begin:end]
        return dataclasses.replace(self, flat_range=(first + begin, first + end), tensor=cut, encoded=encoded)

    def values(self) -> Tensor:
        """Returns the chunk's elements, one-dimensional: a view of the memory in use, or decoded."""
        return self.flat if self.encoded is None else self.encoded.decode().to(self.tensor.dtype)

    def load(self, values: Tensor) -> None:
        """Replaces the chunk's elements by these (any shape)."""
        if self.encoded is None:
            self.tensor.copy_(values.view_as(self.tensor))
        else:
            self.encoded.encode(values.reshape(-1))

    def readable(self) -> "Chunk":
        """Returns the chunk itself, or one with a new tensor in host memory, whose elements `load` then takes."""
        if self.encoded is None:
            return self
        return dataclasses.replace(self, tensor=torch.empty_like(self.tensor, device="cpu"), encoded=None)


def optimizer_state_name(kind: str, parameter_name: str) -> str:
    """Returns the canonical name of an optimizer state tensor. `kind` is `exp_avg`, `exp_avg_sq`, `momentum_buffer`,
    `param` (the main weight), ..."""
    return f"{_OPTIMIZER_PREFIX}{kind}.{parameter_name}"


def is_optimizer_state(name: str) -> bool:
    """Whether a canonical name is that of an optimizer state tensor."""
    return name.startswith(_OPTIMIZER_PREFIX)


def is_weight(name: str) -> bool:
    """Whether a canonical name is that of a weight of the model, not of state that only training reads."""
    return not (is_optimizer_state(name) or fnmatch.fnmatchcase(name, SCALING_STATE))


def parameter_chunk(parameter: Tensor, holders: tuple[int, ...] = ()) -> Chunk:
    """Returns the chunk of a declared and named parameter's weight, without padding."""
    info = info_of(parameter)
    return Chunk(info.name, info.global_shape, info.box, None, parameter.detach().view(-1)[: info.box.numel], holders)


def optimizer_state_chunk(
    kind: str,
    parameter_info: ParameterInfo,
    tensor: Tensor,
    flat_range: tuple[int, int] | None = None,
    holders: tuple[int, ...] = (),
    encoded: EncodedTensor | None = None,
) -> Chunk:
    """Returns the chunk of one kind of optimizer state of a parameter's box, or of a flat range of it. `tensor` has no
    padding."""
    name = optimizer_state_name(kind, parameter_info.name)
    return Chunk(name, parameter_info.global_shape, parameter_info.box, flat_range, tensor, holders, encoded)


def model_chunks(module: nn.Module, holders_of: Callable[[ParameterInfo], tuple[int, ...]]) -> Iterator[Chunk]:
    """Yields a chunk for each parameter of a named model (or model chunk). `holders_of` returns the ranks that hold a
    copy of a parameter."""
    for _, parameter in canonical_names(module):
        yield parameter_chunk(parameter, holders_of(info_of(parameter)))
