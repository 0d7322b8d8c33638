"""Which experts the ranks that share them swap for a step, and where the rows of each expert then are.

An expert has a home: a rank, and a slot in the stacked weights of this rank. Only experts of the same slot are swapped.
The position of an expert is the number of the expert whose home it is in.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class PositionTable:
    """Where experts and their rows are, as seen from one rank. All tensors are int64."""

    position: Tensor
    """[experts]: the position of each expert."""
    expert: Tensor
    """[experts]: the expert in each position."""
    of_sources: Tensor
    """[sources, experts]: how many tokens of each source the expert in each position takes."""
    first: Tensor
    """[experts]: the row in which the tokens of each expert begin if this rank has those of all sources, sorted by slot
    and then by source; -1: the expert is on another rank."""
    counts: Tensor
    """[slots]: number of these rows."""

    def to(self, device: torch.device) -> "PositionTable":
        """Returns the table on a device, by one copy."""
        parts = [getattr(self, field.name) for field in dataclasses.fields(self)]
        moved = torch.cat([part.flatten() for part in parts]).to(device).split([part.numel() for part in parts])
        return PositionTable(*(each.view(part.shape) for each, part in zip(moved, parts, strict=True)))


def place_experts(counts: Tensor, homes: Homes, rank: int) -> PositionTable:
    """Returns the table of a rank on the host, given the tokens of each source for each expert there, int64 [sources,
    experts]."""
    slots = len(homes[0])
    expert = torch.tensor([home * slots + slot for own in homes for slot, home in enumerate(own)])
    own = expert[rank * slots : (rank + 1) * slots]
    rows = counts.sum(0)[own]
    first = torch.full_like(expert, -1)
    first[own] = rows.cumsum(0) - rows
    return PositionTable(expert.argsort(), expert, counts[:, expert], first, rows)
