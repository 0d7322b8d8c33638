"""Overlaps and tilings of random boxes and flat ranges, against slicing of a whole numbered tensor."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.geometry import (
    FlatRange,
    check_tiling,
    contiguous_ranges,
    merge_dimensions,
    overlaps,
)
from megatron.core.parameters import Box

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def parts(draw, shape):
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    if draw(st.booleans()):  # spans of whole dimensions are what real layouts have
        keep = draw(st.integers(0, len(shape)))
        start, extent = start[:keep] + (0,) * len(shape[keep:]), extent[:keep] + shape[keep:]
    numel = math.prod(extent)
    begin = draw(st.integers(0, numel))
    return FlatRange(Box(start, extent), begin, draw(st.integers(begin, numel)))


@st.composite
def pairs(draw):
    shape = draw(shapes)
    return shape, draw(parts(shape)), draw(parts(shape))


def elements(shape, part):
    """Canonical row-major numbers of the elements of a part, by slicing the whole tensor."""
    whole = torch.arange(math.prod(shape)).view(shape)
    box = whole[tuple(slice(a, a + n) for a, n in zip(part.box.start, part.box.shape, strict=True))]
    return box.reshape(-1)[part.begin : part.end].clone()


@settings(deadline=None)
@given(pairs())
def test_overlaps_move_exactly_the_shared_elements(case):
    shape, target, source = case
    have, into = elements(shape, source), torch.full((target.numel,), -1)
    shared = overlaps(shape, target, source)
    for overlap in shared:
        view = overlap.target_view(into)
        assert (view == -1).all()  # no element is written twice
        view.copy_(overlap.source_view(have))
    wanted = elements(shape, target)
    expected = torch.where(torch.isin(wanted, have), wanted, -1)
    assert torch.equal(into, expected)
    assert sum(overlap.numel for overlap in shared) == int((expected >= 0).sum())


@settings(deadline=None)
@given(pairs())
def test_runs_are_the_part_in_order_and_few(case):
    shape, part, _ = case
    offset = 0
    for contiguous_range in contiguous_ranges(part):
        assert contiguous_range.offset == offset
        inside = elements(shape, FlatRange(contiguous_range.box, 0, contiguous_range.box.numel))
        assert torch.equal(inside, elements(shape, part)[offset : offset + contiguous_range.box.numel])
        offset += contiguous_range.box.numel
    assert offset == part.numel
    assert len(list(contiguous_ranges(part))) <= max(2 * len(shape) - 1, 1)


@settings(deadline=None)
@given(pairs())
def test_merging_dimensions_keeps_every_number(case):
    shape, a, b = case
    merged_shape, merged = merge_dimensions(shape, [a.box, b.box])
    for part, box in zip((a, b), merged, strict=True):
        assert torch.equal(elements(merged_shape, FlatRange(box, part.begin, part.end)), elements(shape, part))


@st.composite
def tilings(draw):
    """A tensor cut into boxes along random dimensions, each box cut into flat ranges, in random order."""
    shape = draw(shapes)
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 3)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[dim]))
        for begin, extent in ((0, cut), (cut, box.shape[dim] - cut)):
            if extent:
                start, size = list(box.start), list(box.shape)
                start[dim], size[dim] = box.start[dim] + begin, extent
                boxes.append(Box(tuple(start), tuple(size)))
    found = []
    for box in boxes:
        cuts = sorted({0, box.numel, *draw(st.lists(st.integers(0, box.numel), max_size=3))})
        found += [FlatRange(box, a, b) for a, b in itertools.pairwise(cuts)]
    return shape, draw(st.permutations(found))


@settings(max_examples=200, deadline=None)
@given(tilings())
def test_a_tiling_is_recognised(case):
    shape, tiles = case
    tiling = check_tiling(shape, tiles)
    assert tiling.missing == 0 and tiling.twice is None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(tilings(), st.data())
def test_a_hole_and_a_double_are_found(case, data):
    shape, tiles = case
    victim = data.draw(st.integers(0, len(tiles) - 1))
    without = [*tiles[:victim], *tiles[victim + 1 :]]
    assert check_tiling(shape, without).missing == tiles[victim].numel

    extra = data.draw(parts(shape).filter(lambda part: part.numel))
    doubled = [*tiles, extra]
    first, second = check_tiling(shape, doubled).twice
    assert torch.isin(elements(shape, doubled[first]), elements(shape, doubled[second])).any()


@settings(max_examples=200, deadline=None)
@given(tilings(), st.data())
def test_a_hole_hidden_by_a_double_of_the_same_size_is_found(case, data):
    shape, tiles = case
    victim = data.draw(st.integers(0, len(tiles) - 1))
    if len(tiles) == 1:
        return
    same_size = [*tiles]
    other = tiles[victim - 1]
    same_size[victim] = other.part(0, min(other.numel, tiles[victim].numel))
    assert check_tiling(shape, same_size).twice is not None
