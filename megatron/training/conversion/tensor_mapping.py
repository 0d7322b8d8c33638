"""Which part of a canonical tensor each tensor of a Hugging Face model holds.

Each hub tensor is a box of one canonical tensor, row by row in the same order, so conversion only copies numbers:

- q_proj, k_proj and v_proj are slices of `linear_qkv` [groups, query heads of a group + 2, head width, hidden size];
- gate_proj and up_proj are the halves of `linear_fc1` [2, ffn_hidden_size, hidden size];
- the matrices of one expert are one index of a tensor [experts, ...] that holds all experts of a layer.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

ALL = slice(None)
QUERIES, KEYS, VALUES = (ALL, slice(None, -2)), (ALL, slice(-2, -1)), (ALL, slice(-1, None))
GATE, UP = (slice(0, 1),), (slice(1, 2),)

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class HubTensorPattern:
    """The hub tensors of all layers and experts that correspond to one canonical tensor of a layer."""

    name: str
    """Name in the safetensors file, with `{layer}` and `{expert}` in place of the numbers."""
    part: tuple[slice, ...] = ()
    """Slices of the first axes of the canonical tensor. If the name has `{expert}`, the expert axis is not included."""
    dims: int | None = None
    """The pattern is for canonical tensors of this many dimensions; None: of any number. A gated MLP has one more."""


TensorMapping = Mapping[str, tuple[HubTensorPattern, ...]]
"""Hub tensors by canonical name. The canonical name has `{layer}` in place of the layer's number."""


@dataclass(frozen=True)
class HubTensor:
    """A tensor of a Hugging Face model, and the box of the canonical tensor that it holds."""

    name: str
    canonical_name: str
    global_shape: tuple[int, ...]
    """Shape of the whole canonical tensor."""
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file: [rows, columns] for a matrix, one dimension for a bias or norm weight."""
        is_matrix = len(self.global_shape) > 1 and self.canonical_name.endswith(".weight")
        return (self.box.numel // self.box.shape[-1], self.box.shape[-1]) if is_matrix else (self.box.numel,)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Size in bytes when stored as `dtype`."""
        return self.box.numel * dtype.itemsize


def hub_tensors(mapping: TensorMapping, shapes: Mapping[str, tuple[int, ...]]) -> list[HubTensor]:
    """Returns all hub tensors of a model, in the order of `shapes`: canonical name -> shape.

    Raises UserError naming the canonical tensors that the mapping lacks.
    """
    unmapped = [name for name in shapes if _LAYER.sub("{layer}", name) not in mapping]
    if unmapped:
        more = f" and {len(unmapped) - 5} more" if len(unmapped) > 5 else ""
        raise UserError(f"the architecture has no tensor for {', '.join(unmapped[:5])}{more}")
    return [tensor for name, shape in shapes.items() for tensor in _tensors_of(mapping, name, shape)]


def _tensors_of(mapping: TensorMapping, name: str, shape: tuple[int, ...]) -> Iterator[HubTensor]:
    found = _LAYER.search(name)
    layer = found.group() if found else ""
    patterns = [found for found in mapping[_LAYER.sub("{layer}", name)] if found.dims in (None, len(shape))]
    if any("{expert}" in pattern.name for pattern in patterns):
        for expert in range(shape[0]):
            for pattern in patterns:
                box = _box(shape, (slice(expert, expert + 1), *pattern.part))
                yield HubTensor(pattern.name.format(layer=layer, expert=expert), name, shape, box)
    else:
        for pattern in patterns:
            yield HubTensor(pattern.name.format(layer=layer), name, shape, _box(shape, pattern.part))


def _box(shape: tuple[int, ...], part: tuple[slice, ...]) -> Box:
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
