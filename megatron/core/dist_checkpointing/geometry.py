"""Overlaps of flat ranges of boxes, and whether ranges tile a tensor. Works on integers only.

A flat range of a row-major box with n dimensions consists of at most 2n - 1 boxes: the rest of the first row, whole
rows, the beginning of the last row, and so on in each dimension. Dimensions that all boxes span in full are merged
first, so most ranges consist of one or three boxes.
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
        """Number of elements."""
        return self.end - self.begin

    def part(self, begin: int, end: int) -> "FlatRange":
        """Returns the range of the elements [begin, end), counted from this range's first element."""
        return FlatRange(self.box, self.begin + begin, self.begin + end)


@dataclass(frozen=True)
class ContiguousRange:
    """A box of a flat range whose elements are contiguous in the range's memory: they begin at element `offset` and are
    in row-major order. The box is in coordinates of the whole tensor."""

    offset: int
    box: Box


@dataclass(frozen=True)
class Overlap:
    """Elements that two flat ranges share.

    `box` contains the shared elements. `target` and `source` are the contiguous parts of the two ranges that contain
    `box`.
    """

    box: Box
    target: ContiguousRange
    source: ContiguousRange

    @property
    def numel(self) -> int:
        """Number of shared elements."""
        return self.box.numel

    def target_view(self, flat: Tensor) -> Tensor:
        """Returns the shared elements as a view of the target range's flat memory, with the shape of `box`."""
        return _view(flat, self.target, self.box)

    def source_view(self, flat: Tensor) -> Tensor:
        """Returns the shared elements as a view of the source range's flat memory, with the shape of `box`."""
        return _view(flat, self.source, self.box)


def _view(flat: Tensor, outer: ContiguousRange, box: Box) -> Tensor:
    view = flat[outer.offset : outer.offset + outer.box.numel].view(outer.box.shape)
    for dim, (begin, origin, length) in enumerate(zip(box.start, outer.box.start, box.shape, strict=True)):
        view = view.narrow(dim, begin - origin, length)
    return view


def merge_dimensions(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[tuple[int, ...], list[Box]]:
    """Merges every dimension that all boxes span in full into the dimension before it. Returns the new shape and boxes.

    The row-major numbering of the tensor's elements and of each box's elements does not change.
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


def contiguous_ranges(flat_range: FlatRange) -> Iterator[ContiguousRange]:
    """Yields the boxes that a flat range consists of, in the order of its elements."""
    origin = flat_range.box.start
    for offset, start, shape in _range_boxes(flat_range.box.shape, flat_range.begin, flat_range.end):
        yield ContiguousRange(offset, Box(tuple(a + b for a, b in zip(origin, start, strict=True)), shape))


def _range_boxes(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yields (offset from `begin`, start, shape) of the boxes that the elements [begin, end) of a row-major array
    consist of."""
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
    """Returns the box that two boxes share; None if they share no element."""
    start = tuple(map(max, a.start, b.start))
    end = (min(p + n, q + m) for p, n, q, m in zip(a.start, a.shape, b.start, b.shape, strict=True))
    shape = tuple(e - s for s, e in zip(start, end, strict=True))
    return Box(start, shape) if all(extent > 0 for extent in shape) else None


def overlaps(shape: Sequence[int], target: FlatRange, source: FlatRange) -> list[Overlap]:
    """Returns the elements that two ranges of a tensor of this shape share."""
    if intersect(target.box, source.box) is None:
        return []
    _, (target_box, source_box) = merge_dimensions(shape, [target.box, source.box])
    source_ranges = list(contiguous_ranges(FlatRange(source_box, source.begin, source.end)))
    return [
        Overlap(common, target_range, source_range)
        for target_range in contiguous_ranges(FlatRange(target_box, target.begin, target.end))
        for source_range in source_ranges
        if (common := intersect(target_range.box, source_range.box)) is not None
    ]


@dataclass(frozen=True)
class Tiling:
    """How ranges cover a tensor. They tile it if `missing` is 0 and `twice` is None."""

    missing: int
    """Number of elements in no range; 0 if ranges overlap."""
    twice: tuple[int, int] | None
    """Indices of two ranges that share elements."""


def check_tiling(shape: Sequence[int], parts: Sequence[FlatRange]) -> Tiling:
    """Checks whether every element of a tensor of this shape is in exactly one of the ranges."""
    merged_shape, boxes = merge_dimensions(shape, [part.box for part in parts])
    indexed = [
        (index, contiguous.box)
        for index, (part, box) in enumerate(zip(parts, boxes, strict=True))
        for contiguous in contiguous_ranges(FlatRange(box, part.begin, part.end))
    ]
    twice = _overlapping(indexed, len(merged_shape))
    missing = math.prod(shape) - sum(box.numel for _, box in indexed)
    return Tiling(max(missing, 0) if twice is None else 0, twice)


def _overlapping(indexed: list[tuple[int, Box]], dims: int) -> tuple[int, int] | None:
    """Indices of two boxes that intersect; None if all are disjoint. Takes pairs of index and box."""
    if len(indexed) < 2:
        return None
    indexed = sorted(indexed, key=lambda pair: pair[1].start)
    begin = np.array([box.start for _, box in indexed], dtype=np.int64)
    end = begin + np.array([box.shape for _, box in indexed], dtype=np.int64)
    if dims == 1:  # sorted intervals are disjoint if neighbors are
        clash = np.flatnonzero(begin[1:, 0] < end[:-1, 0])
        return (indexed[clash[0]][0], indexed[clash[0] + 1][0]) if clash.size else None
    for index in range(len(indexed) - 1):
        # Sorted by the first coordinate: boxes that begin after this one ends cannot intersect it.
        stop = int(np.searchsorted(begin[:, 0], end[index, 0]))
        others = slice(index + 1, stop)
        meets = ((begin[others] < end[index]) & (begin[index] < end[others])).all(axis=1)
        if meets.any():
            return indexed[index][0], indexed[index + 1 + int(meets.argmax())][0]
    return None
