"""Placement of experts on a GPU, so that the kernels behind it do not wait for the host."""

import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.moe.placement import LEAST_GAIN, PositionTable
from megatron.core.ops.tiles import next_power_of_2

_MANY = tl.constexpr(2**62)


@triton.jit
def _place_experts_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    counts, position, expert, of_sources, first, slot_counts, bounds, by_source, at_home, sources, ranks, slots, rank,
    LEAST: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    r, i = tl.arange(0, RANKS)[:, None], tl.arange(0, SLOTS)[None, :]
    exists, experts = (r < ranks) & (i < slots), ranks * slots
    load = tl.zeros((RANKS, SLOTS), tl.int64)
    for source in range(sources):
        load += tl.load(counts + source * experts + r * slots + i, mask=exists, other=0)
    home = tl.zeros((RANKS, SLOTS), tl.int32) + r
    every, slot_of = tl.arange(0, RANKS), tl.arange(0, SLOTS)
    total = tl.sum(load, 1)
    whole = tl.sum(total, 0)
    swaps = whole >= 0
    while swaps:
        highest = tl.max(tl.where(every < ranks, total, -1), 0)
        lowest = tl.min(tl.where(every < ranks, total, _MANY), 0)
        # The first of those that are equal, as in the reference.
        full = tl.min(tl.where((every < ranks) & (total == highest), every, RANKS), 0)
        empty = tl.min(tl.where((every < ranks) & (total == lowest), every, RANKS), 0)
        gap = highest - lowest
        moved = tl.sum(tl.where(r == full, load, 0), 0) - tl.sum(tl.where(r == empty, load, 0), 0)
        distance = tl.where(slot_of < slots, tl.abs(gap - 2 * moved), _MANY)
        slot = tl.min(tl.where(distance == tl.min(distance, 0), slot_of, SLOTS), 0)
        taken = tl.sum(tl.where(slot_of == slot, moved, 0), 0)
        swaps = tl.minimum(taken, gap - taken) * LEAST * ranks > whole
        taken = tl.where(swaps, taken, 0)
        total += tl.where(every == empty, taken, 0) - tl.where(every == full, taken, 0)
        at_full, at_empty = (r == full) & (i == slot) & swaps, (r == empty) & (i == slot) & swaps
        load += tl.where(at_empty, taken, 0) - tl.where(at_full, taken, 0)
        home_full = tl.sum(tl.sum(tl.where(at_full, home, 0), 1), 0)
        home_empty = tl.sum(tl.sum(tl.where(at_empty, home, 0), 1), 0)
        home = tl.where(at_full, home_empty, tl.where(at_empty, home_full, home))
    number = (home * slots + i).to(tl.int64)  # the expert in each position
    tl.store(expert + r * slots + i, number, mask=exists)
    tl.store(position + number, (r * slots + i).to(tl.int64), mask=exists)
    for source in range(sources):
        found = tl.load(counts + source * experts + number, mask=exists, other=0)
        tl.store(of_sources + source * experts + r * slots + i, found, mask=exists)
    # The rows of this rank
    inside = slot_of < slots
    own = tl.sum(tl.where(r == rank, number, 0), 0)
    rows = tl.sum(tl.where(r == rank, load, 0), 0)
    swapped = tl.sum(tl.where(r == rank, home, 0), 0) != rank
    end = tl.cumsum(rows, 0)
    begin = end - rows
    tl.store(first + number, tl.where(r == rank, begin[None, :], -1), mask=exists)
    tl.store(slot_counts + slot_of, rows, mask=inside)
    tl.store(bounds + slot_of, begin.to(tl.int32), mask=inside)
    tl.store(bounds + slots + slot_of, end.to(tl.int32), mask=inside)
    step = sources * slots
    so_far = begin
    for source in range(sources):
        at = source * slots + slot_of
        until = so_far + tl.load(counts + source * experts + own, mask=inside, other=0)
        tl.store(by_source + at, so_far.to(tl.int32), mask=inside)
        tl.store(by_source + step + at, until.to(tl.int32), mask=inside)
        tl.store(at_home + at, so_far.to(tl.int32), mask=inside)
        tl.store(at_home + step + slots + at, tl.where(swapped, so_far, until).to(tl.int32), mask=inside)
        so_far = until
    tl.store(at_home + step + slot_of, begin.to(tl.int32), mask=inside)
    tl.store(at_home + 2 * step + slots + slot_of, tl.where(swapped, end, begin).to(tl.int32), mask=inside)


def place_experts_triton(counts: Tensor, ranks: int, rank: int) -> PositionTable:
    """Computes `placement.place_experts` without waiting for the device."""
    counts = counts.contiguous()
    sources, experts = counts.shape
    slots = experts // ranks
    table = PositionTable(sources, ranks, slots, counts.device)
    _place_experts_kernel[(1,)](
        counts, table.position, table.expert, table.of_sources, table.first, table.counts, table.bounds,
        table.bounds_by_source, table.bounds_at_home, sources, ranks, slots, rank,
        LEAST=LEAST_GAIN, RANKS=next_power_of_2(ranks), SLOTS=next_power_of_2(slots),
    )  # fmt: skip
    return table
