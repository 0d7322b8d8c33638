"""Swaps experts between ranks for the length of a step, so that the ranks of an expert parallel group compute equally
many rows.

The fullest rank decides how long a layer takes, since all ranks exchange rows before and after it. Early in training a
few experts take most tokens, and one of two ranks can have 85% of the rows. He et al., "FasterMoE" (PPoPP 2022), copy
the weights of such experts to other ranks. Here two ranks swap an expert, so that a rank computes and keeps as many
experts as before.

Only experts of the same slot are swapped, so that gradients and weights keep their place in a rank's buffers
(`megatron.core.ops.moe.placement`). In a step, a layer goes like this:

- In forward of the first micro-batch, when the router has chosen experts, `start_count` gathers how many tokens each
  expert takes. `positions` plans the swaps from the counts and returns where the experts are now; on a GPU a kernel
  plans, and the host learns the result later. Later micro-batches of the step have the same weights, so their counts
  are alike.
- `start_swap` sends the weights. Before the experts compute, `finish_swap` puts those that have arrived into their
  slots.
- When its gradients are complete, `start_return` sends them to the homes of their experts and restores the weights
  there; `finish_step` waits for them. Optimizer, checkpoints and hooks always find experts at home.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import (
    Group,
    HostCopy,
    Pending,
    gather_rows,
    group_rank,
    group_size,
    start_all_to_all_rows,
)
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.ops.moe.placement import Homes, PositionTable, place_experts
from megatron.core.parameters import main_grad_accumulator
from megatron.core.utils.torch_private import foreach_copy_


class TableOnHost:
    """A table of positions that is being copied to the host."""

    def __init__(self, table: PositionTable) -> None:
        self._table, self._copy = table, HostCopy(table.memory)

    @functools.cached_property
    def table(self) -> PositionTable:
        """The table on the host. Waits for the device."""
        return self._table.of_copy(self._copy.wait())

    @functools.cached_property
    def rows(self) -> list[int]:
        """The rows that this rank computes, by slot."""
        found: list[int] = self.table.counts.tolist()
        return found

    @functools.cached_property
    def any_swapped(self) -> bool:
        """Whether any rank computes another home's expert."""
        return self.table.any_swapped


@dataclass(frozen=True)
class ExpertPositions:
    """Where the experts of a layer are while a micro-batch is in it."""

    table: PositionTable | None = None
    """None: all experts are at home. The rows in it are those of the micro-batch that was counted."""
    on_host: TableOnHost | None = None
    """The table on the host; None: this micro-batch is not counted."""

    def not_counted(self) -> "ExpertPositions":
        """Returns the positions for another micro-batch."""
        return ExpertPositions(self.table)

    def groups(self) -> RowGroups:
        """Returns the rows of a counted micro-batch by slot, without their number on the host."""
        assert self.table is not None and self.on_host is not None
        derived = {"bounds": self.table.bounds, "bounds by source": self.table.bounds_by_source}
        return RowGroups(self.table.counts, derived=derived)

    def experts_in(self, rank: int, slots: int) -> Tensor | slice:
        """Returns the index of the experts that a rank with this number of slots computes."""
        own = slice(rank * slots, (rank + 1) * slots)
        return own if self.table is None else self.table.expert[own]


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

    def __init__(
        self,
        experts: nn.Module,
        ep_group: Group,
        etp_group: Group,
        place: Callable[[Tensor, int, int], PositionTable] = place_experts,
    ) -> None:
        self.experts, self.place = experts, place
        self.ep_group, self.etp_group = ep_group, etp_group
        self.ranks, self.rank = group_size(ep_group), group_rank(ep_group)
        self.is_due = False
        """Whether a step has begun whose swaps are not planned yet."""
        self._counted: Tensor | None = None
        """The counts from which the swaps of this step will be planned."""
        self._planned: TableOnHost | None = None
        """The positions of experts whose swaps have not started yet."""
        self._positions = ExpertPositions()
        self._moves: _Moves | None = None
        self._arriving: Pending | None = None
        self._home_weights: Tensor | None = None
        """Copies of the weights that this rank has sent; None if all experts are at home, or on their way there."""
        self._returning: Pending | None = None
        """The gradients of this home's experts."""

    def start_count(self, counts: Tensor) -> Tensor | None:
        """Returns the counts of all ranks, given this rank's tokens that each expert takes, int64 [experts]. Returns
        None if the swaps of this step are planned already, or if no step has begun."""
        if not self.is_due:
            return None
        self.is_due = False
        self._counted = gather_rows(gather_rows(counts[None], self.ep_group), self.etp_group)
        return self._counted

    def positions(self, counted: Tensor | None) -> ExpertPositions:
        """Returns where the experts are for the micro-batch of which `start_count` has returned `counted`. Plans the
        swaps of the step if it is the first one. On a GPU with Triton the host does not wait."""
        if counted is None:
            return self._positions.not_counted()
        if counted is self._counted:
            self._counted = None
            table = self.place(counted, self.ranks, self.rank)
            self._planned = TableOnHost(table)
            self._positions = ExpertPositions(table, self._planned)
        return self._positions

    def start_swap(self) -> None:
        """Starts to send the weights of experts that other ranks compute, if swaps are planned and have not started.
        The host waits for the plan."""
        planned, self._planned = self._planned, None
        if planned is not None and planned.any_swapped:
            slots = planned.table.slots
            self._start((planned.table.expert // slots).view(-1, slots).tolist())

    def _start(self, homes: Homes) -> None:
        self._moves = _Moves.of(homes, self.rank)
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
        """Returns where the experts are."""

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

    def __init__(self, placement: ExpertPlacement, counted: Tensor | None) -> None:
        """`counted`: the result of `ExpertPlacement.start_count` for this micro-batch, if it was called."""
        self._placement, self._counted = placement, counted

    def positions(self) -> ExpertPositions:
        """Returns where the experts are."""
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
