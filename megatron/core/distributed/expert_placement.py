"""Swaps experts between ranks for the length of a step, so that the ranks of an expert parallel group compute equally
many rows.

The fullest rank decides how long a layer takes, since all ranks exchange rows before and after it. Early in training a
few experts take most tokens, and one of two ranks can have 85% of the rows. He et al., "FasterMoE" (PPoPP 2022), copy
the weights of such experts to other ranks. Here two ranks swap an expert, so that a rank computes and keeps as many
experts as before.

An expert has a home: a rank, and a slot in the stacked weights of this rank. Only experts of the same slot are swapped,
so that gradients and weights keep their place in a rank's buffers. A step goes like this:

- `begin_step` plans the swaps from the tokens that each expert took two steps earlier, which are on the host by then,
  and starts to send the weights.
- In forward, `renumbering` tells the router's result where the experts are.
- `finish_step` returns the gradients to the homes of their experts and restores the weights there. Optimizer,
  checkpoints and hooks always find experts at home.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.collectives import (
    Group,
    HostCopy,
    Pending,
    all_reduce,
    group_rank,
    group_size,
    start_all_to_all_rows,
)
from megatron.core.parameters import main_grad_accumulator

_LEAST_GAIN = 0.02
"""Share of a rank's mean rows that a swap must take from the fuller of two ranks. Sending an expert's weights and
gradients can take as long as computing half of that."""
_DELAY = 2
"""Steps between the counts of tokens and the swaps that are planned from them. The counts of the step before are not on
the host yet when the next step begins."""

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
        self._numbers: Renumbering | None = None
        self._counts: Tensor | None = None
        self._moves: _Moves | None = None
        self._arriving: list[tuple[Tensor, Pending]] = []
        self._home_weights: list[Tensor] = []
        """Copies of the weights that this rank has sent, for each parameter [n, ...]."""

    def note(self, counts: Tensor) -> None:
        """Adds the tokens of this rank that each expert takes in a micro-batch, int64 [experts]."""
        self._counts = counts.clone() if self._counts is None else self._counts.add_(counts)

    def take_counts(self) -> Tensor | None:
        """Returns the sum of the noted counts and resets it; None if nothing was noted."""
        counts, self._counts = self._counts, None
        return counts

    def renumbering(self) -> Renumbering | None:
        """Returns where the experts are, or None if all are at home. Weights that this rank computes with are in its
        memory for later kernels of the current stream."""
        self._finish_arrival()
        return self._numbers

    @property
    def is_swapped(self) -> bool:
        """Whether this rank computes experts of other homes."""
        return self._moves is not None

    def start_swap(self, homes: Homes, numbers: Renumbering) -> None:
        """Starts to send the weights of experts that other ranks compute."""
        self._numbers = numbers
        moves = _Moves.of(homes, self.rank)
        self._moves = moves
        for parameter in self.experts.parameters():
            sent = moves.taken_from(parameter.detach()) if moves.sent else parameter.detach()[:0]
            self._home_weights.append(sent)
            self._arriving.append((parameter.detach(), moves.start(sent, self.ep_group)))

    def _finish_arrival(self) -> None:
        arriving, self._arriving = self._arriving, []
        for weight, pending in arriving:
            rows = pending.wait()
            assert self._moves is not None
            self._moves.put_into(weight, rows)

    def start_return(self) -> list[tuple[Tensor, Pending]]:
        """Starts to send the gradients of other homes' experts there, and restores the weights of this home. Returns
        the gradients with what arrives, for `finish_return`."""
        assert self._moves is not None
        self._finish_arrival()
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
        self._counts: deque[HostCopy] = deque()
        self._counts_at_start: list[HostCopy] = []
        """`_counts` when this step began."""

    @classmethod
    def of(cls, chunk: nn.Module) -> "PlacementSteps":
        """Returns those of the layers that have an `expert_placement`."""
        found = [getattr(module, "expert_placement", None) for module in chunk.modules()]
        return cls([placement for placement in found if isinstance(placement, ExpertPlacement)])

    @torch.no_grad()
    def begin_step(self, again: bool = False) -> None:
        """Starts the swaps of a step. `again`: those of the last step, which is computed again."""
        self._go_home()
        if again:
            self._counts = deque(self._counts_at_start)
        self._counts_at_start = list(self._counts)
        if len(self._counts) < _DELAY:
            return
        counts = self._counts.popleft().wait()
        layers = [
            balanced_homes(by_expert.view(placement.ranks, -1).tolist())
            for placement, by_expert in zip(self.placements, counts, strict=True)
        ]
        device = next(self.placements[0].experts.parameters()).device
        numbers = torch.tensor([_numbers(homes) for homes in layers])  # [layers, 2, experts]
        if device.type == "cuda":
            numbers = numbers.pin_memory().to(device, non_blocking=True)
        for placement, homes, (position, expert) in zip(self.placements, layers, numbers, strict=True):
            if any(home != rank for rank, own in enumerate(homes) for home in own):
                placement.start_swap(homes, Renumbering(position, expert))

    @torch.no_grad()
    def finish_step(self) -> None:
        """Returns gradients and weights to their homes, after backward and all reductions. Starts to copy the counts of
        this step to the host."""
        counts = [placement.take_counts() for placement in self.placements]
        noted = [of_layer for of_layer in counts if of_layer is not None]
        if noted:
            total = torch.stack([noted[0] * 0 if of_layer is None else of_layer for of_layer in counts])
            total = all_reduce(all_reduce(total, self.placements[0].ep_group), self.placements[0].etp_group)
            self._counts.append(HostCopy(total))
        self._go_home()

    def _go_home(self) -> None:
        swapped = [placement for placement in self.placements if placement.is_swapped]
        returning = [placement.start_return() for placement in swapped]
        for placement, gradients in zip(swapped, returning, strict=True):
            placement.finish_return(gradients)


def _numbers(homes: Homes) -> tuple[list[int], list[int]]:
    """Returns the position of each expert, and the expert in each position."""
    slots = len(homes[0])
    experts = [home * slots + slot for own in homes for slot, home in enumerate(own)]
    positions = [0] * len(experts)
    for position, expert in enumerate(experts):
        positions[expert] = position
    return positions, experts
