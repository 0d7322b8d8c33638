"""Swaps experts between ranks for the length of a step, so that the ranks of an expert parallel group compute equally
many rows.

The fullest rank decides how long a layer takes, since all ranks exchange rows before and after it. Early in training a
few experts take most tokens, and one of two ranks can have 85% of the rows. He et al., "FasterMoE" (PPoPP 2022), copy
the weights of such experts to other ranks. Here two ranks swap an expert, so that a rank computes and keeps as many
experts as before.

An expert has a home: a rank, and a slot in the stacked weights of this rank. Only experts of the same slot are swapped,
so that gradients and weights keep their place in a rank's buffers. In a step, a layer goes like this:

- In forward of the first micro-batch, when the router has chosen experts, `start_count` gathers how many tokens each
  expert takes. `positions` waits for the counts, plans the swaps from them and returns where the experts are now. Later
  micro-batches of the step have the same weights, so their counts are alike.
- `start_swap` sends the weights. Before the experts compute, `finish_swap` puts those that have arrived into their
  slots.
- When its gradients are complete, `start_return` sends them to the homes of their experts and restores the weights
  there; `finish_step` waits for them. Optimizer, checkpoints and hooks always find experts at home.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core.collectives import (
    Group,
    HostCopy,
    Pending,
    gather_rows,
    group_rank,
    group_size,
    start_all_to_all_rows,
)
from megatron.core.ops.moe.grouped_linear import Bounds, RowGroups
from megatron.core.parameters import main_grad_accumulator
from megatron.core.utils.torch_private import foreach_copy_

_LEAST_GAIN = 0.02
"""Share of a rank's mean rows that a swap must take from the fuller of two ranks. Sending an expert's weights and
gradients can take as long as computing half of that."""
Homes = list[list[int]]
"""[ranks][slots]: the home rank of the expert that a rank computes in a slot."""


def balanced_homes(rows: Sequence[Sequence[int]]) -> Homes:
    """Returns which experts the ranks swap, given the rows of each expert by home rank and slot. Swaps an expert of the
    fullest rank with one of the emptiest until no such swap is worth its cost."""
    homes = [[rank] * len(own) for rank, own in enumerate(rows)]
    load = [list(own) for own in rows]
    totals = [sum(own) for own in rows]
    least = _LEAST_GAIN * sum(totals) / len(totals)
    while True:
        full, empty = totals.index(max(totals)), totals.index(min(totals))
        gap = totals[full] - totals[empty]
        if gap <= 2 * least:  # no swap takes more than half of it
            return homes
        moved = [a - b for a, b in zip(load[full], load[empty], strict=True)]
        slot = min(range(len(moved)), key=lambda i: abs(gap - 2 * moved[i]))
        if min(moved[slot], gap - moved[slot]) <= least:
            return homes
        totals[full] -= moved[slot]
        totals[empty] += moved[slot]
        for of_rank in (load, homes):
            of_rank[full][slot], of_rank[empty][slot] = of_rank[empty][slot], of_rank[full][slot]


@dataclass(frozen=True)
class ExpertPositions:
    """Where the experts of a layer are while a micro-batch is in it. The position of an expert is the number of the
    expert whose home it is in."""

    position: Tensor | None = None
    """int64 [experts]: the position of each expert; None: all experts are at home."""
    expert: Tensor | None = None
    """int64 [experts]: the expert in each position."""
    of_ranks: tuple[Tensor, Tensor] | None = None
    """int64 [ranks, experts], on the device and on the host: how many tokens of each rank the expert in each position
    takes, by etp rank, then by ep rank. None: not counted."""
    first: Tensor | None = None
    """int64 [experts]: the row in which the tokens of each expert begin if this rank has those of all ranks, sorted by
    slot; -1: the expert is on another rank. None: not counted."""
    groups: RowGroups | None = None
    """These rows by slot. None: not counted."""

    bounds_at_home: Bounds | None = None
    """Where the rows of each rank begin and end in each slot if the rows of swapped experts are left out, and these
    rows of all ranks as one more part: two int32 [ranks + 1, slots]. None: not counted, or nothing is swapped."""

    def not_counted(self) -> "ExpertPositions":
        """Returns the positions for another micro-batch."""
        return ExpertPositions(self.position, self.expert)

    def experts_in(self, rank: int, slots: int) -> Tensor | slice:
        """Returns the index of the experts that a rank with this number of slots computes."""
        own = slice(rank * slots, (rank + 1) * slots)
        return own if self.expert is None else self.expert[own]


class _PositionTable:
    """Positions on the host and on the device, in memory that each step uses again. Nothing waits for the device, and
    one copy brings everything there: the host is late when it knows the counts, because the experts wait for it."""

    def __init__(self, shape: tuple[int, ...], slots: int, rank: int, device: torch.device) -> None:
        """`shape`: that of the counts, [ranks, experts]."""
        ranks, experts = shape
        self._own, self._every = slice(rank * slots, (rank + 1) * slots), np.arange(experts)
        sizes = [experts, experts, ranks * experts, experts, slots, slots, ranks * slots, (ranks + 1) * slots]
        self._host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.empty(sum(sizes), dtype=torch.int64, device=device)

        def views(memory: Tensor) -> list[Tensor]:
            *numbers, of_slots, by_source, at_home = memory.split(sizes)
            numbers[2] = numbers[2].view(ranks, experts)
            bounds = (edges.view(torch.int32) for edges in (of_slots, by_source, at_home))
            return [*numbers, *(edges.view(2, -1, slots) for edges in bounds)]

        self._on_device, self._on_host = views(self._device), views(self._host)
        self._arrays = [tensor.numpy() for tensor in self._on_host]
        self._at_home = np.arange(experts)[self._own]
        self._edges = np.zeros(slots * ranks + 1, dtype=np.int64)
        """Where the rows of each slot and source begin, and the end of all."""

    def filled(self, homes: Homes, counts: np.ndarray) -> ExpertPositions:
        """Returns the positions for homes [ranks][slots], given the counts [ranks, experts]. All positions that were
        returned before become invalid."""
        position, expert, of_ranks, first, count, of_slots, by_source, at_home = self._arrays
        slots, ranks, edges = len(homes[0]), counts.shape[0], self._edges
        bounds = of_slots[:, 0]
        expert[:] = [home * slots + slot for own in homes for slot, home in enumerate(own)]
        position[expert] = self._every
        counts.take(expert, 1, of_ranks)
        of_ranks[:, self._own].T.reshape(-1).cumsum(out=edges[1:])
        bounds[0], bounds[1] = edges[:-1:ranks], edges[ranks::ranks]
        by_source[0], by_source[1] = edges[:-1].reshape(slots, ranks).T, edges[1:].reshape(slots, ranks).T
        first.fill(-1)
        first[expert[self._own]] = bounds[0]
        count[:] = bounds[1] - bounds[0]
        swapped = expert[self._own] != self._at_home
        if swapped.any():
            at_home[0, :-1], at_home[1, :-1] = by_source[0], np.where(swapped, by_source[0], by_source[1])
            at_home[0, -1], at_home[1, -1] = bounds[0], np.where(swapped, bounds[1], bounds[0])
        self._device.copy_(self._host, non_blocking=True)
        there = self._on_device
        groups = RowGroups(there[4], count.tolist(), derived={"bounds": there[5][:, 0], "bounds by source": there[6]})
        left_out = (there[7][0], there[7][1]) if swapped.any() else None
        return ExpertPositions(there[0], there[1], (there[2], self._on_host[2]), there[3], groups, left_out)


class _RankCounts:
    """How many tokens of each rank each expert takes, int64 [ranks, experts]."""

    def __init__(self, counts: Tensor) -> None:
        self.device, self.on_host = counts.device, HostCopy(counts)


@dataclass(frozen=True)
class _Moves:
    """Slots that a rank sends and receives, each with the other rank, by rank and then by slot."""

    sent: list[tuple[int, int]]
    received: list[tuple[int, int]]
    ranks: int

    @classmethod
    def of(cls, homes: Homes, rank: int) -> "_Moves":
        slots = [slot for slot, home in enumerate(homes[rank]) if home != rank]
        holders = [(next(r for r, own in enumerate(homes) if own[slot] == rank), slot) for slot in slots]
        return cls(sorted(holders), sorted((homes[rank][slot], slot) for slot in slots), len(homes))

    def back(self) -> "_Moves":
        return _Moves(self.received, self.sent, self.ranks)

    def taken_from(self, stacks: Sequence[Tensor]) -> Tensor:
        """Returns copies of the slots to send, [n, elements of a slot in all stacks]."""
        if not self.sent:
            return stacks[0].new_empty(0, sum(stack[0].numel() for stack in stacks))
        slots = [stack[slot].view(-1) for _, slot in self.sent for stack in stacks]
        return torch.cat(slots).view(len(self.sent), -1)

    def start(self, rows: Tensor, group: Group) -> Pending:
        """Starts to send the result of `taken_from`."""
        sent, received = (
            [sum(rank == other for rank, _ in moves) for other in range(self.ranks)]
            for moves in (self.sent, self.received)
        )
        return start_all_to_all_rows(rows, group, received, sent)

    def put_into(self, stacks: Sequence[Tensor], rows: Tensor) -> None:
        """Copies the received rows into their slots."""
        sizes = [stack[0].numel() for stack in stacks]
        targets = [stack[slot].view(-1) for _, slot in self.received for stack in stacks]
        if targets:
            foreach_copy_(targets, [part for row in rows for part in row.split(sizes)])


class ExpertPlacement:
    """The experts that a rank computes in one layer of a step. The parameters of `experts` are stacked: [experts of
    this rank, ...]."""

    def __init__(self, experts: nn.Module, num_experts: int, ep_group: Group, etp_group: Group) -> None:
        self.experts, self.num_experts = experts, num_experts
        self.ep_group, self.etp_group = ep_group, etp_group
        self.ranks, self.rank = group_size(ep_group), group_rank(ep_group)
        self.is_due = False
        """Whether a step has begun whose swaps are not planned yet."""
        self._counted: _RankCounts | None = None
        """The counts from which the swaps of this step will be planned."""
        self._planned: Homes | None = None
        """The swaps that have not started yet."""
        self._positions = ExpertPositions()
        self._table: _PositionTable | None = None
        self._moves: _Moves | None = None
        self._arriving: Pending | None = None
        self._home_weights: Tensor | None = None
        """Copies of the weights that this rank has sent; None if all experts are at home, or on their way there."""
        self._returning: Pending | None = None
        """The gradients of this home's experts."""

    def start_count(self, counts: Tensor) -> _RankCounts | None:
        """Starts to gather the counts of all ranks, given this rank's tokens that each expert takes, int64 [experts].
        Returns None if the swaps of this step are planned already, or if no step has begun."""
        if not self.is_due:
            return None
        self.is_due = False
        self._counted = _RankCounts(gather_rows(gather_rows(counts[None], self.ep_group), self.etp_group))
        return self._counted

    def positions(self, counted: _RankCounts | None) -> ExpertPositions:
        """Returns where the experts are for the micro-batch of which `start_count` has returned `counted`. Plans the
        swaps of the step if it is the first one; the host then waits for the counts."""
        if counted is None:
            return self._positions.not_counted()
        if counted is self._counted:
            self._counted = None
            counts = counted.on_host.wait().numpy()  # [ranks, experts]
            homes = balanced_homes(counts.sum(0).reshape(self.ranks, -1).tolist())
            if self._table is None:
                self._table = _PositionTable(counts.shape, self.num_experts // self.ranks, self.rank, counted.device)
            self._positions = self._table.filled(homes, counts)
            if any(home != rank for rank, own in enumerate(homes) for home in own):
                self._planned = homes
        return self._positions

    def start_swap(self) -> None:
        """Starts to send the weights of experts that other ranks compute, if swaps are planned and have not started."""
        if self._planned is not None:
            self._moves, self._planned = _Moves.of(self._planned, self.rank), None
            self._home_weights = self._moves.taken_from(self._weights)
            self._arriving = self._moves.start(self._home_weights, self.ep_group)

    def finish_swap(self) -> None:
        """Puts the weights that arrive into their slots. Later kernels of the current stream compute with them."""
        self.start_swap()
        if self._arriving is not None:
            assert self._moves is not None
            self._moves.put_into(self._weights, self._arriving.wait())
            self._arriving = None

    @torch.no_grad()
    def start_return(self) -> None:
        """Starts to send the gradients of other homes' experts there, and restores the weights of this home. Call it
        when the gradients of this rank are complete. A second call does nothing."""
        if self._home_weights is not None:
            assert self._moves is not None
            self.finish_swap()
            back, gradients = self._moves.back(), self._gradients
            back.put_into(self._weights, self._home_weights)
            self._home_weights = None
            if gradients:
                self._returning = back.start(back.taken_from(gradients), self.ep_group)

    def finish_return(self) -> None:
        """Puts the gradients that arrive into the slots of their experts."""
        if self._returning is not None:
            assert self._moves is not None
            self._moves.back().put_into(self._gradients, self._returning.wait())
        self._moves = self._returning = None

    def end_step(self) -> None:
        """Forgets where the experts were, when they are at home again."""
        self.is_due, self._counted, self._positions = False, None, ExpertPositions()

    @functools.cached_property
    def _parameters(self) -> list[nn.Parameter]:
        return list(self.experts.parameters())

    @property
    def _weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters]

    @property
    def _gradients(self) -> list[Tensor]:
        found = [main_grad_accumulator(parameter) for parameter in self._parameters]
        return [main_grad.gradient for main_grad in found if main_grad is not None]


class Placement(Protocol):
    """Where the experts of a layer are for one micro-batch."""

    def positions(self) -> ExpertPositions:
        """Returns where the experts are. The host may wait for counts."""

    def start_swap(self) -> None:
        """Starts to bring the weights of this rank's experts, if they are not there."""

    def finish_swap(self) -> None:
        """Lets later kernels of the current stream compute with them."""


class AtHome:
    """All experts are always at home."""

    def positions(self) -> ExpertPositions:
        """Returns the positions of experts at home."""
        return ExpertPositions()

    def start_swap(self) -> None:
        """Does nothing."""

    def finish_swap(self) -> None:
        """Does nothing."""


AT_HOME = AtHome()


class MicroBatchPlacement:
    """The placement of a layer for one micro-batch of a step. The first micro-batch plans the swaps."""

    def __init__(self, placement: ExpertPlacement, counted: _RankCounts | None) -> None:
        """`counted`: the result of `ExpertPlacement.start_count` for this micro-batch, if it was called."""
        self._placement, self._counted = placement, counted

    def positions(self) -> ExpertPositions:
        """Returns where the experts are. The host waits for the counts of the step's first micro-batch."""
        return self._placement.positions(self._counted)

    def start_swap(self) -> None:
        """Starts to send the weights of swapped experts."""
        self._placement.start_swap()

    def finish_swap(self) -> None:
        """Puts the weights that arrive into their slots."""
        self._placement.finish_swap()


class PlacementSteps:
    """The placements of a model chunk's layers in each step. All ranks that share experts must call the methods
    together."""

    def __init__(self, placements: Sequence[ExpertPlacement]) -> None:
        self.placements = list(placements)

    @classmethod
    def of(cls, chunk: nn.Module) -> "PlacementSteps":
        """Returns those of the layers that have an `expert_placement`."""
        found = [getattr(module, "expert_placement", None) for module in chunk.modules()]
        return cls([placement for placement in found if isinstance(placement, ExpertPlacement)])

    @torch.no_grad()
    def begin_step(self) -> None:
        """Lets every layer plan its swaps in forward."""
        self.finish_step()
        for placement in self.placements:
            placement.is_due = True

    @torch.no_grad()
    def finish_step(self) -> None:
        """Returns gradients and weights to their homes, after backward and all reductions, where this has not begun."""
        for placement in self.placements:
            placement.start_return()
        for placement in self.placements:
            placement.finish_return()
            placement.end_step()

    def returns_of(self, parameters: Iterable[Tensor]) -> list[Callable[[], None]]:
        """Returns `start_return` of each layer whose experts have any of the parameters."""
        these = set(parameters)
        return [p.start_return for p in self.placements if not these.isdisjoint(p.experts.parameters())]
