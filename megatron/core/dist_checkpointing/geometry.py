"""Flat ranges of boxes, as boxes: where two chunks of one tensor overlap, and whether chunks tile it. Pure integers.

A flat range of a row-major box with n dimensions is at most 2n - 1 boxes (the rest of a first row, whole rows, the
beginning of a last row, and so in each dimension). Dimensions that all parties hold in full are merged first, so most
ranges are one or three intervals.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megatron.core.parameters import Box


@dataclass(frozen=True)
class FlatRange:
    """The elements [begin, end) of a box, numbered in row-major order of the box."""

    box: Box
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def part(self, begin: int, end: int) -> "FlatRange":
        """The elements [begin, end), counted from this part's first."""
        return FlatRange(self.box, self.begin + begin, self.begin + end)


@dataclass(frozen=True)
class ContiguousRange:
    """A box of canonical coordinates whose elements lie from `offset` on, in row-major order, in a part's memory."""

    offset: int
    box: Box


@dataclass(frozen=True)
class Overlap:
    """Elements that two parts share: a box, and the contiguous_range of each part in which it lies."""

    box: Box
    target: ContiguousRange
    source: ContiguousRange

    @property
    def numel(self) -> int:
        return self.box.numel

    def target_view(self, flat: Tensor) -> Tensor:
        """The shared elements in the target part's flat memory, shaped as the shared box."""
        return _view(flat, self.target, self.box)

    def source_view(self, flat: Tensor) -> Tensor:
        """The shared elements in the source part's flat memory, shaped as the shared box."""
        return _view(flat, self.source, self.box)


def _view(flat: Tensor, contiguous_range: ContiguousRange, box: Box) -> Tensor:
    inside = flat[contiguous_range.offset : contiguous_range.offset + contiguous_range.box.numel].view(
        contiguous_range.box.shape
    )
    for dim, (begin, origin, length) in enumerate(zip(box.start, contiguous_range.box.start, box.shape, strict=True)):
        inside = inside.narrow(dim, begin - origin, length)
    return inside


def merge_dimensions(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[tuple[int, ...], list[Box]]:
    """The same tensor and boxes with every dimension that all boxes span in full merged into the one before it.

    Row-major numbering, of the tensor and of each box, is unchanged by it.
    """
    merged = [1]
    starts, shapes = [[0] for _ in boxes], [[1] for _ in boxes]
    for dim, size in enumerate(shape):
        if all(box.shape[dim] == size for box in boxes):
            merged[-1] *= size
            for start, extent in zip(starts, shapes, strict=True):
                start[-1] *= size
                extent[-1] *= size
        elif merged[-1] == 1:
            merged[-1] = size
            for box, start, extent in zip(boxes, starts, shapes, strict=True):
                start[-1], extent[-1] = box.start[dim], box.shape[dim]
        else:
            merged.append(size)
            for box, start, extent in zip(boxes, starts, shapes, strict=True):
                start.append(box.start[dim])
                extent.append(box.shape[dim])
    return tuple(merged), [Box(tuple(a), tuple(b)) for a, b in zip(starts, shapes, strict=True)]


def contiguous_ranges(part: FlatRange) -> Iterator[ContiguousRange]:
    """The part as boxes in canonical coordinates, in the order of its elements."""
    for offset, start, shape in _range_boxes(part.box.shape, part.begin, part.end):
        yield ContiguousRange(offset, Box(tuple(a + b for a, b in zip(part.box.start, start, strict=True)), shape))


def _range_boxes(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(offset from begin, start, shape) of boxes that make up the elements [begin, end) of a row-major array."""
    if begin >= end:
        return
    if not shape:
        yield 0, (), ()
        return
    rest = shape[1:]
    row_size = math.prod(rest)
    first, head = divmod(begin, row_size)
    last, tail = divmod(end, row_size)
    if first == last:  # within one row
        yield from _in_row(first, rest, head, tail, 0)
        return
    offset = 0
    if head:
        yield from _in_row(first, rest, head, row_size, 0)
        offset = row_size - head
        first += 1
    if last > first:
        yield offset, (first, *(0,) * len(rest)), (last - first, *rest)
        offset += (last - first) * row_size
    yield from _in_row(last, rest, 0, tail, offset)


def _in_row(
    row: int, shape: tuple[int, ...], begin: int, end: int, offset: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    for inner, start, extent in _range_boxes(shape, begin, end):
        yield offset + inner, (row, *start), (1, *extent)


def intersect(a: Box, b: Box) -> Box | None:
    """The common box; None where there is none."""
    start = tuple(map(max, a.start, b.start))
    end = (min(p + n, q + m) for p, n, q, m in zip(a.start, a.shape, b.start, b.shape, strict=True))
    shape = tuple(e - s for s, e in zip(start, end, strict=True))
    return Box(start, shape) if all(extent > 0 for extent in shape) else None


def overlaps(shape: Sequence[int], target: FlatRange, source: FlatRange) -> list[Overlap]:
    """What two parts of one tensor of this shape share; empty when nothing."""
    if intersect(target.box, source.box) is None:
        return []
    _, (target_box, source_box) = merge_dimensions(shape, [target.box, source.box])
    source_runs = list(contiguous_ranges(FlatRange(source_box, source.begin, source.end)))
    return [
        Overlap(common, target_run, source_run)
        for target_run in contiguous_ranges(FlatRange(target_box, target.begin, target.end))
        for source_run in source_runs
        if (common := intersect(target_run.box, source_run.box)) is not None
    ]


@dataclass(frozen=True)
class Tiling:
    """How parts cover a tensor: exactly once everywhere when `missing` is 0 and `twice` is None."""

    missing: int
    """Elements that no part holds."""
    twice: tuple[int, int] | None
    """Positions, in the list of parts, of two that share elements."""


def check_tiling(shape: Sequence[int], parts: Sequence[FlatRange]) -> Tiling:
    """Whether every element of a tensor of this shape lies in exactly one of the parts."""
    merged_shape, boxes = merge_dimensions(shape, [part.box for part in parts])
    pieces = [
        (index, contiguous_range.box)
        for index, (part, box) in enumerate(zip(parts, boxes, strict=True))
        for contiguous_range in contiguous_ranges(FlatRange(box, part.begin, part.end))
    ]
    twice = _shared(pieces, len(merged_shape))
    missing = math.prod(shape) - sum(box.numel for _, box in pieces)
    return Tiling(max(missing, 0) if twice is None else 0, twice)


def _shared(pieces: list[tuple[int, Box]], dims: int) -> tuple[int, int] | None:
    """Owners of two pieces that intersect; None when all are disjoint."""
    if len(pieces) < 2:
        return None
    pieces = sorted(pieces, key=lambda piece: piece[1].start)
    begin = np.array([box.start for _, box in pieces], dtype=np.int64)
    end = begin + np.array([box.shape for _, box in pieces], dtype=np.int64)
    if dims == 1:  # sorted intervals are disjoint when neighbours are
        clash = np.flatnonzero(begin[1:, 0] < end[:-1, 0])
        return (pieces[clash[0]][0], pieces[clash[0] + 1][0]) if clash.size else None
    for index in range(len(pieces) - 1):
        # Sorted by the first coordinate: whoever begins after this one ends cannot meet it.
        stop = int(np.searchsorted(begin[:, 0], end[index, 0]))
        others = slice(index + 1, stop)
        meets = ((begin[others] < end[index]) & (begin[index] < end[others])).all(axis=1)
        if meets.any():
            return pieces[index][0], pieces[index + 1 + int(meets.argmax())][0]
    return None
