"""Which experts the ranks that share them swap for a step, and where the rows of each expert then are.

An expert has a home: a rank, and a slot in the stacked weights of this rank. Only experts of the same slot are swapped.
The position of an expert is the number of the expert whose home it is in.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

LEAST_GAIN = 50
"""A swap must take more than this part of a rank's mean rows, a fiftieth, from the fuller of two ranks. Sending an
expert's weights and gradients can take as long as computing half of that."""
Homes = list[list[int]]
"""[ranks][slots]: the home rank of the expert that a rank computes in a slot."""


def balanced_homes(rows: Sequence[Sequence[int]]) -> Homes:
    """Returns which experts the ranks swap, given the rows of each expert by home rank and slot. Swaps an expert of the
    fullest rank with one of the emptiest until no such swap is worth its cost."""
    homes = [[rank] * len(own) for rank, own in enumerate(rows)]
    load = [list(own) for own in rows]
    totals = [sum(own) for own in rows]
    while True:
        full, empty = totals.index(max(totals)), totals.index(min(totals))
        gap = totals[full] - totals[empty]
        moved = [a - b for a, b in zip(load[full], load[empty], strict=True)]
        slot = min(range(len(moved)), key=lambda i: abs(gap - 2 * moved[i]))
        if min(moved[slot], gap - moved[slot]) * LEAST_GAIN * len(totals) <= sum(totals):
            return homes
        totals[full] -= moved[slot]
        totals[empty] += moved[slot]
        for of_rank in (load, homes):
            of_rank[full][slot], of_rank[empty][slot] = of_rank[empty][slot], of_rank[full][slot]


class PositionTable:
    """Where experts and their rows are, as seen from one rank. All tensors are views of one memory, so that one copy
    moves them between device and host."""

    def __init__(
        self, sources: int, ranks: int, slots: int, device: torch.device, memory: Tensor | None = None
    ) -> None:
        """`sources`: ranks whose tokens are counted; `ranks`: those that divide the experts, with `slots` experts each.
        `memory`: a copy of another table's; None: the table has no values yet."""
        self.sources, self.ranks, self.slots = sources, ranks, slots
        experts = ranks * slots
        self._starts = [0, *accumulate((experts, experts, sources * experts, experts, slots))]
        bounds = (slots, sources * slots, (sources + 1) * slots)  # two of 32 bits in each element
        self._starts += [self._starts[-1] + end for end in accumulate(bounds)]
        if memory is None:
            memory = torch.empty(self._starts[-1], dtype=torch.int64, device=device)
        self.memory = memory
        """int64 [elements]"""

    def _part(self, number: int) -> Tensor:
        return self.memory[self._starts[number] : self._starts[number + 1]]

    def _bounds(self, number: int) -> Tensor:
        return self._part(number).view(torch.int32).view(2, -1, self.slots)

    @cached_property
    def position(self) -> Tensor:
        """int64 [experts]: the position of each expert."""
        return self._part(0)

    @cached_property
    def expert(self) -> Tensor:
        """int64 [experts]: the expert in each position."""
        return self._part(1)

    @cached_property
    def of_sources(self) -> Tensor:
        """int64 [sources, experts]: how many tokens of each source the expert in each position takes."""
        return self._part(2).view(self.sources, -1)

    @cached_property
    def first(self) -> Tensor:
        """int64 [experts]: the row in which the tokens of each expert begin if this rank has those of all sources,
        sorted by slot and then by source; -1: the expert is on another rank."""
        return self._part(3)

    @cached_property
    def counts(self) -> Tensor:
        """int64 [slots]: number of these rows."""
        return self._part(4)

    @cached_property
    def bounds(self) -> Tensor:
        """int32 [2, slots]: where they begin and end."""
        return self._bounds(5)[:, 0]

    @cached_property
    def bounds_by_source(self) -> Tensor:
        """int32 [2, sources, slots]: where those of each source do."""
        return self._bounds(6)

    @cached_property
    def bounds_at_home(self) -> Tensor:
        """int32 [2, sources + 1, slots]: the same without the rows of swapped experts, which are one more part."""
        return self._bounds(7)

    def of_copy(self, memory: Tensor) -> "PositionTable":
        """Returns the table of a copy of `memory`."""
        return PositionTable(self.sources, self.ranks, self.slots, memory.device, memory)

    @property
    def any_swapped(self) -> bool:
        """Whether any rank computes another home's expert. Waits for the device."""
        return not torch.equal(self.expert, torch.arange(self.expert.shape[0], device=self.expert.device))


def place_experts(counts: Tensor, ranks: int, rank: int) -> PositionTable:
    """Returns the table of a rank, given the tokens of each source for each expert, int64 [sources, experts]. Waits for
    the device."""
    sources, experts = counts.shape
    slots, by_source = experts // ranks, counts.cpu().numpy()
    homes = balanced_homes(by_source.sum(0).reshape(ranks, slots).tolist())
    table = PositionTable(sources, ranks, slots, torch.device("cpu"))
    expert = np.array([home * slots + slot for own in homes for slot, home in enumerate(own)])
    own = slice(rank * slots, (rank + 1) * slots)
    swapped = expert[own] != np.arange(experts)[own]
    table.expert.numpy()[:] = expert
    table.position.numpy()[expert] = np.arange(experts)
    table.of_sources.numpy()[:] = by_source[:, expert]
    rows = by_source[:, expert[own]].T  # [slots, sources]
    ends = rows.cumsum().reshape(rows.shape)
    begins = ends - rows
    table.counts.numpy()[:] = rows.sum(1)
    table.bounds.numpy()[:] = begins[:, 0], ends[:, -1]
    table.first.fill_(-1)
    table.first.numpy()[expert[own]] = begins[:, 0]
    table.bounds_by_source.numpy()[:] = begins.T, ends.T
    at_home = table.bounds_at_home.numpy()
    at_home[:, :-1] = begins.T, np.where(swapped, begins.T, ends.T)
    at_home[:, -1] = begins[:, 0], np.where(swapped, ends[:, -1], begins[:, 0])
    return table.of_copy(table.memory.to(counts.device))
