"""Which part of a canonical tensor a tensor on disk is.

Every tensor of the families here is a box of one of ours, row by row in the same order: queries, keys and values are
parts of `linear_qkv` [groups, heads of a group + 2, d, h], gate and up the halves of `linear_fc1` [2, ffn, h], an
expert's matrices one row of a tensor that all experts of a layer share. So converting is copying; no number changes.
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
class Piece:
    """A tensor on disk: its name, with `{layer}` and `{expert}`, and its part of the canonical tensor along the first
    axes. With `{expert}` in the name there is one for each index of the very first axis, which `part` leaves out."""

    name: str
    part: tuple[slice, ...] = ()


PieceTable = Mapping[str, tuple[Piece, ...]]
"""Pieces by canonical name, with `{layer}` for the layer's number."""


@dataclass(frozen=True)
class DiskTensor:
    """A tensor on disk and the box of a canonical tensor that it holds."""

    name: str
    canonical_name: str
    global_shape: tuple[int, ...]
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Matrices are [rows, columns], biases and norms one row, whatever axes the canonical shape has."""
        is_matrix = len(self.global_shape) > 1 and self.canonical_name.endswith(".weight")
        return (self.box.numel // self.box.shape[-1], self.box.shape[-1]) if is_matrix else (self.box.numel,)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of its elements in a type."""
        return self.box.numel * dtype.itemsize


def disk_tensors(table: PieceTable, shapes: Mapping[str, tuple[int, ...]]) -> list[DiskTensor]:
    """All tensors on disk of a model whose canonical tensors have these shapes, in the order of those.

    Raises UserError naming the canonical tensors that the family has no place for.
    """
    homeless = [name for name in shapes if _LAYER.sub("{layer}", name) not in table]
    if homeless:
        more = f" and {len(homeless) - 5} more" if len(homeless) > 5 else ""
        raise UserError(f"the architecture has no place for {', '.join(homeless[:5])}{more}")
    return [tensor for name, shape in shapes.items() for tensor in _pieces_of(table, name, shape)]


def _pieces_of(table: PieceTable, name: str, shape: tuple[int, ...]) -> Iterator[DiskTensor]:
    found = _LAYER.search(name)
    layer = found.group() if found else ""
    pieces = table[_LAYER.sub("{layer}", name)]
    if any("{expert}" in piece.name for piece in pieces):
        for expert in range(shape[0]):
            for piece in pieces:
                box = _box(shape, (slice(expert, expert + 1), *piece.part))
                yield DiskTensor(piece.name.format(layer=layer, expert=expert), name, shape, box)
    else:
        for piece in pieces:
            yield DiskTensor(piece.name.format(layer=layer), name, shape, _box(shape, piece.part))


def _box(shape: tuple[int, ...], part: tuple[slice, ...]) -> Box:
    spans = [slice_.indices(size)[:2] for slice_, size in zip(part, shape, strict=False)]
    spans += [(0, size) for size in shape[len(spans) :]]
    box = Box(tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))
    assert math.prod(box.shape) > 0, (shape, part)
    return box


def files_of(
    tensors: Iterable[DiskTensor], dtype_of: Callable[[DiskTensor], torch.dtype], file_bytes: int
) -> Iterator[list[DiskTensor]]:
    """The tensors in their order, a list a file: of at most so many bytes, or of one tensor."""
    file: list[DiskTensor] = []
    held = 0
    for tensor in tensors:
        nbytes = tensor.nbytes(dtype_of(tensor))
        if file and held + nbytes > file_bytes:
            yield file
            file, held = [], 0
        file.append(tensor)
        held += nbytes
    yield file
