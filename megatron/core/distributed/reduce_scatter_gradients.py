"""Sharded gradients: those of every micro-batch are reduced by themselves and added to what a rank owns.

A unit's whole gradients have memory from their first contribution to the end of their reduction, and no longer. With
late weight gradients that is from the first input gradient to the last product, which the schedule has to bound.

All ranks reduce the units in one fixed order, the last first, each once a micro-batch. When a unit's gradients are
complete is known by the number of contributions: of a backward pass, or of a micro-batch's late products, learned from
the first of each. Until then a unit is taken to be complete once a later one in the order gets a contribution; what was
taken too early gets a second reduction, at the end. Sums do not mind.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.distributed.autograd_callbacks import BackwardEndCallback
from megatron.core.distributed.buckets import Reductions
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.reductions import PendingReduction
from megatron.core.parameters import info_of


class TransientGradients:
    """The whole gradients of one unit, which come and go, and what this rank owns of their sum, which stays."""

    def __init__(self, unit: Unit, owned: Tensor, reductions: Reductions, wire_dtype: torch.dtype) -> None:
        self.owned = owned
        self.reductions = reductions
        self.wire_dtype = wire_dtype
        self.whole = torch.empty(unit.plan.numel, dtype=unit.plan.main_dtype, device=unit.device)
        self._nbytes = self.whole.untyped_storage().nbytes()
        self.num_accumulated = 0
        """Contributions that lie in the whole gradients."""
        self.seen = 0
        """Contributions in this backward pass, or of these late products."""
        self.expected: dict[bool, int] = {}
        """How many there are in all, once known: of a backward pass (False), of late products (True)."""
        self._sum: PendingReduction | None = None

    def open(self) -> None:
        """Have memory for a contribution that is about to come."""
        self.finish()
        if self.whole.untyped_storage().nbytes() == 0:
            self.whole.untyped_storage().resize_(self._nbytes)
            self.whole.zero_()

    def start(self) -> None:
        """Begin the sum over the ranks that share the unit."""
        if not self.num_accumulated:  # another rank may have something
            self.open()
        self.num_accumulated = 0
        self._sum = self.reductions.data.start_part(self.whole, self.wire_dtype)

    def finish(self) -> None:
        """If a sum is under way, wait for it, add it to what this rank owns, and give the memory back."""
        if self._sum is not None:
            self.owned.add_(self._sum.wait())
            self._sum = None
            self.whole.untyped_storage().resize_(0)

    def forget(self) -> None:
        """Drop what is not reduced."""
        self.finish()
        self.whole.untyped_storage().resize_(0)
        self.num_accumulated = self.seen = 0


@dataclass(frozen=True)
class OwnedGradients:
    """What this rank owns of the gradients of all units of one kind, end to end."""

    flat: Tensor
    reductions: Reductions
    wire_dtype: torch.dtype


class ReduceScatterGradients:
    """The gradients of the units of a model chunk that are reduced after every micro-batch."""

    def __init__(
        self,
        units: Sequence[Unit],
        reductions: Mapping[str, Reductions],
        wire_dtype: Callable[[Unit], torch.dtype],
        overlap: bool,
    ) -> None:
        self.overlap = overlap
        self.owned: list[OwnedGradients] = []
        self.passing: list[TransientGradients] = []
        """In the order in which they are reduced."""
        parts = self._share_out(units, reductions, wire_dtype)
        for unit in reversed(units):
            self._bind(unit, TransientGradients(unit, parts[unit], reductions[unit.plan.grid], wire_dtype(unit)))
        self._next = 0
        """The first in `passing` that is not yet reduced in this micro-batch."""
        self._under_way: TransientGradients | None = None
        self._backward_end = BackwardEndCallback(self._backward_ended)
        self._held = False
        """Products are put off: nothing is complete."""
        self._late = False
        """Products that were put off are being computed."""
        self._finished = False

    def _share_out(
        self,
        units: Sequence[Unit],
        reductions: Mapping[str, Reductions],
        wire_dtype: Callable[[Unit], torch.dtype],
    ) -> dict[Unit, Tensor]:
        kinds: dict[tuple[str, torch.dtype], list[Unit]] = {}
        for unit in units:
            kinds.setdefault((unit.plan.grid, unit.plan.dtype), []).append(unit)
        parts: dict[Unit, Tensor] = {}
        for (grid, _), alike in kinds.items():
            sizes = [unit.owned_weights.numel() for unit in alike]
            flat = torch.zeros(sum(sizes), dtype=alike[0].plan.main_dtype, device=alike[0].device)
            parts |= zip(alike, flat.split(sizes), strict=True)
            self.owned.append(OwnedGradients(flat, reductions[grid], wire_dtype(alike[0])))
        return parts

    def _bind(self, unit: Unit, passing: TransientGradients) -> None:
        number = len(self.passing)

        def opened() -> None:
            self._open(number)

        def on_accumulated(parameter: nn.Parameter) -> None:
            self._on_accumulated(number, parameter)

        self.passing.append(passing)
        unit.bind_gradients(passing.whole, passing.owned, on_accumulated, opened)
        passing.forget()  # views can be made only of what has memory

    # Contributions ---------------------------------------------------------------------------------------------------

    def _open(self, number: int) -> None:
        passing = self.passing[number]
        if self._next == 0:
            self._finish_under_way()  # of the micro-batch before, which had a forward's time
        if not self._held and self._late not in passing.expected:
            # Before memory is taken: what is complete, as far as one can tell, is to make room.
            self._start_while(lambda other: other.seen > 0, number)
        passing.open()

    def _on_accumulated(self, number: int, parameter: nn.Parameter) -> None:
        if self._finished:
            raise RuntimeError(
                f"a gradient of {info_of(parameter).name} came after the step's reductions were finished: "
                "zero_grad_buffer() was not called before this step"
            )
        passing = self.passing[number]
        passing.num_accumulated += 1
        passing.seen += 1
        self._backward_end.expect()
        if not self._held and self._late in passing.expected:
            self._start_while(lambda other: other.seen >= other.expected[self._late], len(self.passing))

    def _start_while(self, complete: Callable[[TransientGradients], bool], stop: int) -> None:
        while self._next < stop and complete(self.passing[self._next]):
            self._start(self.passing[self._next])
            self._next += 1

    def _start(self, passing: TransientGradients) -> None:
        # One reduction at a time has memory beside the unit that backward is at.
        self._finish_under_way()
        passing.start()
        self._under_way = passing
        if not self.overlap:
            passing.finish()

    def _finish_under_way(self) -> None:
        if self._under_way is not None:
            self._under_way.finish()
            self._under_way = None

    def _backward_ended(self) -> None:
        if not self._held:
            self._learn_and_flush()

    def _learn_and_flush(self) -> None:
        for passing in self.passing:
            passing.expected[self._late] = passing.seen
        self.flush()

    # Late products ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Backward passes in here put products off."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self._forget_seen()

    @contextlib.contextmanager
    def late(self) -> Iterator[None]:
        """Products of one micro-batch that were put off are computed in here; then it is complete."""
        self._late = True
        try:
            yield
            self._learn_and_flush()
        finally:
            self._late = False

    # Steps -----------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Begin to reduce all that this micro-batch has left."""
        for passing in self.passing[self._next :]:
            self._start(passing)
        for passing in self.passing:
            if passing.num_accumulated:  # after it was taken to be complete
                self._start(passing)
        self._next = 0
        self._forget_seen()

    def _forget_seen(self) -> None:
        for passing in self.passing:
            passing.seen = 0

    def flush_accumulated(self) -> None:
        """Begin to reduce what came from outside of a backward pass, if anything did."""
        if any(passing.num_accumulated for passing in self.passing):
            self.flush()

    def finish(self) -> None:
        """Wait until this rank owns the sum of the step (on CUDA: order later kernels behind it)."""
        if self._finished:
            return
        self.flush_accumulated()
        self._finish_under_way()
        sums = [
            owned.reductions.replicas.start_whole(owned.flat, owned.wire_dtype)
            for owned in self.owned
            if owned.reductions.replicas is not None
        ]
        for pending in sums:
            pending.wait()
        self._finished = True

    def reset(self) -> None:
        """Zero the gradients, for the next step."""
        for passing in self.passing:
            passing.forget()
        for owned in self.owned:
            owned.flat.zero_()
        self._under_way, self._next, self._finished = None, 0, False
