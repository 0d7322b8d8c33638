"""The unit of a checkpoint: a flat range of a box of a canonical tensor, and the live memory that holds it."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core.parameters import Box, ParameterInfo, canonical_names, info_of

MASTER = "param"
"""Kind of optimizer state that is the full-precision copy of the weight itself; see `optimizer_state_name`."""

_OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True, eq=False)
class Chunk:
    """A contiguous run of canonical elements and the tensor on this rank that holds them.

    The box is a part of the canonical tensor `name` of shape `global_shape`. Its elements are numbered in row-major
    order of the box, and the chunk is the elements [begin, end) of that numbering: `flat_range`, or all of the box.
    `tensor` holds exactly those elements, contiguous, in that order; its own shape does not matter, its dtype is the
    dtype on disk. Saving reads it; loading writes into it in place, so it must be the live memory (a view of a flat
    buffer is fine, a copy is not). Padding is in no chunk: slice it off before.

    `holders` are the global ranks, ascending and without repetition, that hold the same values of the same chunk: a
    weight that is replicated over data parallel ranks names all of them, a range of a sharded optimizer its one rank
    (or its ranks, where shards have replicas). The rank that saves is among them; empty means this rank alone. All
    ranks of a set must list the same chunks under that set: the writing is shared out among them without a message.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    flat_range: tuple[int, int] | None
    tensor: Tensor
    holders: tuple[int, ...] = ()

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
        """[begin, end) in the row-major numbering of the box."""
        return self.flat_range if self.flat_range is not None else (0, self.box.numel)

    @property
    def flat(self) -> Tensor:
        """The chunk's elements as a one-dimensional view of the live memory."""
        # Not view(-1): one element may have any stride, which a later change of type would stumble over.
        return self.tensor.detach().as_strided((self.tensor.numel(),), (1,))

    def part(self, begin: int, end: int) -> "Chunk":
        """The elements [begin, end), counted from the chunk's own first element."""
        first = self.range[0]
        return dataclasses.replace(self, flat_range=(first + begin, first + end), tensor=self.flat[begin:end])


def optimizer_state_name(kind: str, parameter_name: str) -> str:
    """Canonical name of an optimizer state tensor: kind is `exp_avg`, `exp_avg_sq`, `momentum_buffer`, `param`, ..."""
    return f"{_OPTIMIZER_PREFIX}{kind}.{parameter_name}"


def is_optimizer_state(name: str) -> bool:
    return name.startswith(_OPTIMIZER_PREFIX)


def parameter_chunk(parameter: Tensor, holders: tuple[int, ...] = ()) -> Chunk:
    """The chunk of a declared and named parameter's own weight, without its padding."""
    info = info_of(parameter)
    return Chunk(info.name, info.global_shape, info.box, None, parameter.detach().view(-1)[: info.box.numel], holders)


def optimizer_state_chunk(
    kind: str,
    parameter_info: ParameterInfo,
    tensor: Tensor,
    flat_range: tuple[int, int] | None = None,
    holders: tuple[int, ...] = (),
) -> Chunk:
    """The chunk of one kind of state over (a flat range of) a parameter's box; `tensor` is without padding."""
    name = optimizer_state_name(kind, parameter_info.name)
    return Chunk(name, parameter_info.global_shape, parameter_info.box, flat_range, tensor, holders)


def model_chunks(module: nn.Module, holders_of: Callable[[ParameterInfo], tuple[int, ...]]) -> Iterator[Chunk]:
    """A chunk for each parameter of a named model (or model chunk); `holders_of` says which ranks hold a copy."""
    for _, parameter in canonical_names(module):
        yield parameter_chunk(parameter, holders_of(info_of(parameter)))
