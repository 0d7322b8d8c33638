"""Swaps experts between ranks for the length of a step, so that the ranks of an expert parallel group compute equally
many rows.

The fullest rank decides how long a layer takes, since all ranks exchange rows before and after it. Early in training a
few experts take most tokens, and one of two ranks can have 85% of the rows. He et al., "FasterMoE" (PPoPP 2022), copy
the weights of such experts to other ranks. Here two ranks swap an expert, so that a rank computes and keeps as many
experts as before.

An expert has a home: a rank, and a slot in the stacked weights of this rank. Only experts of the same slot are swapped,
so that gradients and weights keep their place in a rank's buffers. In a step, a layer goes like this:

- In forward of the first micro-batch, when the router has chosen experts, `start_count` gathers how many tokens each
  expert takes. `positions` waits for the counts, plans the swaps from them and returns where the experts are now, and
  `start_swap` starts to send the weights. Later micro-batches of the step have the same weights, so their counts are
  alike.
- Before the experts compute, `finish_swap` puts the weights that have arrived into their slots.
- After backward, `finish_step` returns the gradients to the homes of their experts and restores the weights there.
  Optimizer, checkpoints and hooks always find experts at home.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
from megatron.core.parameters import main_grad_accumulator

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
        moved = [a - b for a, b in zip(load[full], load[empty], strict=True)]
        slot = min(range(len(moved)), key=lambda i: abs(gap - 2 * moved[i]))
        if min(moved[slot], gap - moved[slot]) <= least:
            return homes
        totals[full] -= moved[slot]
        totals[empty] += moved[slot]
        for of_rank in (load, homes):
            of_rank[full][slot], of_rank[empty][slot] = of_rank[empty][slot], of_rank[full][slot]


@dataclass(frozen=True)
class Renumbering:
    """Numbers of experts while some are swapped. An expert's position is the number of the expert whose home it is
    in."""

    position: Tensor
    """int64 [experts]: the position of each expert."""
    expert: Tensor
    """int64 [experts]: the expert in each position."""

    @classmethod
    def of(cls, homes: Homes) -> "Renumbering":
        """Returns the numbers, on the host."""
        slots = len(homes[0])
        expert = torch.tensor([home * slots + slot for own in homes for slot, home in enumerate(own)])
        return cls(expert.argsort(), expert)

    def to(self, device: torch.device) -> "Renumbering":
        """Returns the numbers on a device, without waiting for it."""
        if device.type != "cuda":
            return self
        both = torch.stack([self.position, self.expert]).pin_memory().to(device, non_blocking=True)
        return Renumbering(*both)


@dataclass(frozen=True)
class ExpertPositions:
    """Where the experts of a layer are while a micro-batch is in it."""

    numbers: Renumbering | None = None
    """On the tokens' device; None: all experts are at home."""
    of_ranks: tuple[Tensor, Tensor] | None = None
    """int64 [ranks, experts], on the device and on the host: how many tokens of each rank the expert in each position
    takes, by etp rank, then by ep rank. None: not counted."""

    def of(self, experts: Tensor) -> Tensor:
        """Returns the positions of experts, of any shape. -1 stays -1."""
        if self.numbers is None:
            return experts
        return torch.where(experts < 0, experts, self.numbers.position[experts])


class _RankCounts:
    """How many tokens of each rank each expert takes, int64 [ranks, experts]."""

    def __init__(self, counts: Tensor) -> None:
        self.on_device, self.on_host = counts, HostCopy(counts)


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

    def taken_from(self, stacked: Tensor) -> Tensor:
        """Returns copies of the slots to send, [n, ...]."""
        return torch.stack([stacked[slot] for _, slot in self.sent])

    def start(self, rows: Tensor, group: Group) -> Pending:
        """Starts to send the result of `taken_from`."""
        sizes = [[sum(rank == other for rank, _ in moves) for other in range(self.ranks)] for moves in self._both]
        return start_all_to_all_rows(rows, group, sizes[1], sizes[0])

    def put_into(self, stacked: Tensor, rows: Tensor) -> None:
        """Copies the received rows into their slots."""
        for (_, slot), row in zip(self.received, rows, strict=True):
            stacked[slot].copy_(row)

    @property
    def _both(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        return self.sent, self.received


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
        self._numbers: tuple[Renumbering, Renumbering] | None = None
        """On the host and on the device; None if all experts are at home."""
        self._moves: _Moves | None = None
        self._arriving: list[tuple[Tensor, Pending]] = []
        self._home_weights: list[Tensor] = []
        """Copies of the weights that this rank has sent, for each parameter [n, ...]."""

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
        if counted is not None and counted is self._counted:
            self._counted = None
            self._plan(counted)
        if counted is None:
            return ExpertPositions(None if self._numbers is None else self._numbers[1])
        of_ranks = counted.on_device, counted.on_host.wait()
        if self._numbers is None:
            return ExpertPositions(None, of_ranks)
        on_host, on_device = self._numbers
        return ExpertPositions(on_device, (of_ranks[0][:, on_device.expert], of_ranks[1][:, on_host.expert]))

    def _plan(self, counted: _RankCounts) -> None:
        rows = counted.on_host.wait().sum(0).view(self.ranks, -1)
        homes = balanced_homes(rows.tolist())
        if any(home != rank for rank, own in enumerate(homes) for home in own):
            numbers = Renumbering.of(homes)
            self._planned, self._numbers = homes, (numbers, numbers.to(counted.on_device.device))

    def start_swap(self) -> None:
        """Starts to send the weights of experts that other ranks compute, if the swaps have just been planned."""
        if self._planned is None:
            return
        self._moves, self._planned = _Moves.of(self._planned, self.rank), None
        with torch.no_grad():
            for parameter in self.experts.parameters():
                sent = self._moves.taken_from(parameter) if self._moves.sent else parameter.detach()[:0]
                self._home_weights.append(sent)
                self._arriving.append((parameter.detach(), self._moves.start(sent, self.ep_group)))

    def finish_swap(self) -> None:
        """Puts the weights that arrive into their slots. Later kernels of the current stream compute with them."""
        arriving, self._arriving = self._arriving, []
        with torch.no_grad():
            for weight, pending in arriving:
                rows = pending.wait()
                assert self._moves is not None
                self._moves.put_into(weight, rows)

    @property
    def is_swapped(self) -> bool:
        """Whether this rank computes experts of other homes."""
        return self._moves is not None

    def start_return(self) -> list[tuple[Tensor, Pending]]:
        """Starts to send the gradients of other homes' experts there, and restores the weights of this home. Returns
        the gradients with what arrives, for `finish_return`."""
        assert self._moves is not None
        self.finish_swap()
        back, returning = self._moves.back(), []
        for parameter, weights in zip(self.experts.parameters(), self._home_weights, strict=True):
            main_grad = main_grad_accumulator(parameter)
            if main_grad is not None:
                gradient = main_grad.gradient  # type: ignore[attr-defined]
                rows = back.taken_from(gradient) if back.sent else gradient[:0]
                returning.append((gradient, back.start(rows, self.ep_group)))
            back.put_into(parameter.detach(), weights)
        self._home_weights.clear()
        return returning

    def finish_return(self, returning: list[tuple[Tensor, Pending]]) -> None:
        """Puts the gradients that arrive into the slots of their experts."""
        assert self._moves is not None
        back = self._moves.back()
        for gradient, pending in returning:
            back.put_into(gradient, pending.wait())
        self._moves = self._numbers = None


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
        self._go_home()
        for placement in self.placements:
            placement.is_due = True

    @torch.no_grad()
    def finish_step(self) -> None:
        """Returns gradients and weights to their homes, after backward and all reductions."""
        for placement in self.placements:
            placement.is_due = False
        self._go_home()

    def _go_home(self) -> None:
        swapped = [placement for placement in self.placements if placement.is_swapped]
        returning = [placement.start_return() for placement in swapped]
        for placement, gradients in zip(swapped, returning, strict=True):
            placement.finish_return(gradients)
