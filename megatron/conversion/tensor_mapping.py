"""Which part of a canonical tensor each tensor of a Hugging Face model holds.

Each hub tensor consists of boxes of one canonical tensor, mostly of one box, row by row in the same order, so
conversion only copies numbers:

- q_proj, k_proj and v_proj are slices of `linear_qkv` [groups, query heads of a group + 2, head width, hidden size];
- gate_proj and up_proj are the halves of `linear_fc1` [2, ffn_hidden_size, hidden size];
- the matrices of one expert are one index of a tensor [experts, ...] that holds all experts of a layer.

A fused tensor has several boxes, one after another (`fused`) or head by head (`alternate_behind`). A tensor whose
dimensions are transposed or interleaved names the canonical axes of each of its dimensions (`axes`).
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

ALL = slice(None)
QUERIES, KEYS, VALUES = (ALL, slice(None, -2)), (ALL, slice(-2, -1)), (ALL, slice(-1, None))
GATE, UP = (slice(0, 1),), (slice(1, 2),)

Slices = tuple[slice, ...]
Axes = tuple[tuple[int, ...], ...]

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class HubTensorPattern:
    """The hub tensors of all layers and experts that correspond to one canonical tensor of a layer."""

    name: str
    """Name in the safetensors file, with `{layer}` and `{expert}` in place of the numbers."""
    part: Slices = ()
    """Slices of the first axes of the canonical tensor. If the name has `{expert}`, the expert axis is not included."""
    fused: tuple[Slices, ...] = ()
    """Parts that follow `part` in the same hub tensor, along its first dimension."""
    alternate_behind: int | None = None
    """The parts, of equal shape, alternate instead: the hub tensor has them as an axis behind this canonical axis."""
    axes: Axes | None = None
    """For each dimension of the hub tensor the axes of the canonical tensor that it consists of, the slowest first:
    ((1,), (0,)) is a transposed matrix. Default: a weight has its last axis as columns and all others as rows; other
    tensors have one dimension."""
    columns: int | None = None
    """Number of columns of a hub tensor that is a matrix where the canonical tensor is a vector."""
    is_copy: bool = False
    """Whether the hub tensor repeats another one of the same canonical tensor. Exports write it; imports check it."""


TensorMapping = Mapping[str, tuple[HubTensorPattern, ...]]
"""Hub tensors by canonical name. The canonical name has `{layer}` in place of the layer's number, or is that of one
layer, which comes first."""


@dataclass(frozen=True)
class HubTensor:
    """A tensor of a Hugging Face model, and the boxes of the canonical tensor that it holds."""

    name: str
    canonical_name: str
    global_shape: tuple[int, ...]
    """Shape of the whole canonical tensor."""
    boxes: tuple[Box, ...]
    """The boxes, in the order in which they follow each other along the first dimension."""
    axes: Axes | None = None
    """Axes of the canonical tensor in each dimension, as in `HubTensorPattern`."""
    alternate_behind: int | None = None
    """Canonical axis behind which the boxes alternate, as in `HubTensorPattern`."""
    columns: int | None = None
    """Number of columns, as in `HubTensorPattern`."""
    is_copy: bool = False
    """Whether the hub tensor repeats another one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self._shape if self.columns is None else (self.numel // self.columns, self.columns)

    @property
    def _shape(self) -> tuple[int, ...]:
        shapes = [self._shape_of(box) for box in self.boxes]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(box.numel for box in self.boxes)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Returns the size in bytes when stored as `dtype`."""
        return self.numel * dtype.itemsize

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the hub tensor's elements, one-dimensional, from those of each box in canonical order."""
        if self.alternate_behind is not None:
            shaped = [part.view(box.shape) for part, box in zip(parts, self.boxes, strict=True)]
            return torch.stack(shaped, self.alternate_behind + 1).flatten()
        laid_out = [
            part.view(box.shape).permute(self._order).reshape(self._shape_of(box))
            for part, box in zip(parts, self.boxes, strict=True)
        ]
        return (laid_out[0] if len(laid_out) == 1 else torch.cat(laid_out)).flatten()

    def take(self, values: Tensor, box: Box) -> Tensor:
        """Returns the elements of one of the boxes in canonical order, one-dimensional, from the whole hub tensor."""
        if self.alternate_behind is not None:
            axis = self.alternate_behind + 1
            alternating = values.view(*box.shape[:axis], len(self.boxes), *box.shape[axis:])
            return alternating.select(axis, self.boxes.index(box)).flatten()
        before = self.boxes[: self.boxes.index(box)]
        begin = sum(self._shape_of(other)[0] for other in before)
        part = values.view(self._shape).narrow(0, begin, self._shape_of(box)[0])
        order = self._order
        back = sorted(range(len(order)), key=order.__getitem__)
        return part.reshape([box.shape[axis] for axis in order]).permute(back).flatten()

    @property
    def _axes(self) -> Axes:
        if self.axes is not None:
            return self.axes
        every = tuple(range(len(self.global_shape)))
        is_matrix = len(every) > 1 and self.canonical_name.endswith(".weight")
        return (every[:-1], every[-1:]) if is_matrix else (every,)

    @property
    def _order(self) -> tuple[int, ...]:
        return tuple(axis for axes in self._axes for axis in axes)

    def _shape_of(self, box: Box) -> tuple[int, ...]:
        return tuple(math.prod(box.shape[axis] for axis in axes) for axes in self._axes)


def hub_tensors(mapping: TensorMapping, shapes: Mapping[str, tuple[int, ...]]) -> list[HubTensor]:
    """Returns all hub tensors of a model, in the order of `shapes`: canonical name -> shape.

    Raises UserError naming the canonical tensors that the mapping lacks.
    """
    unmapped = [name for name in shapes if name not in mapping and _LAYER.sub("{layer}", name) not in mapping]
    if unmapped:
        more = f" and {len(unmapped) - 5} more" if len(unmapped) > 5 else ""
        raise UserError(f"the architecture has no tensor for {', '.join(unmapped[:5])}{more}")
    return [tensor for name, shape in shapes.items() for tensor in _tensors_of(mapping, name, shape)]


def _tensors_of(mapping: TensorMapping, name: str, shape: tuple[int, ...]) -> Iterator[HubTensor]:
    found = _LAYER.search(name)
    layer = found.group() if found else ""
    patterns = mapping[name if name in mapping else _LAYER.sub("{layer}", name)]
    is_of_experts = any("{expert}" in pattern.name for pattern in patterns)
    for expert in range(shape[0]) if is_of_experts else (None,):
        of_expert = () if expert is None else (slice(expert, expert + 1),)
        for pattern in patterns:
            boxes = tuple(_box(shape, (*of_expert, *part)) for part in (pattern.part, *pattern.fused))
            full_name = pattern.name.format(layer=layer, expert=expert)
            more = pattern.axes, pattern.alternate_behind, pattern.columns, pattern.is_copy
            yield HubTensor(full_name, name, shape, boxes, *more)


def _box(shape: tuple[int, ...], part: Slices) -> Box:
    spans = [slice_.indices(size)[:2] for slice_, size in zip(part, shape, strict=False)]
    spans += [(0, size) for size in shape[len(spans) :]]
    box = Box(tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))
    assert math.prod(box.shape) > 0, (shape, part)
    return box


def split_into_files(
    tensors: Iterable[HubTensor], dtype_of: Callable[[HubTensor], torch.dtype], file_bytes: int
) -> Iterator[list[HubTensor]]:
    """Yields the tensors of each file, in order. A file holds at most `file_bytes` bytes of tensors, or one tensor."""
    file: list[HubTensor] = []
    held = 0
    for tensor in tensors:
        nbytes = tensor.nbytes(dtype_of(tensor))
        if file and held + nbytes > file_bytes:
            yield file
            file, held = [], 0
        file.append(tensor)
        held += nbytes
    yield file
