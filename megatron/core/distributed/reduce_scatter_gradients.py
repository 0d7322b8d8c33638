"""Sharded gradients (ZeRO-2): the gradients of every micro-batch are reduce-scattered and added to each rank's shard.

The whole gradients of a unit have memory only from their first contribution to the end of their reduction. With
deferred weight gradients this lasts from the first input gradient to the last product; the schedule has to bound it.

All ranks reduce the units in one fixed order, last unit first, once for each micro-batch. A unit is complete when it
has received the expected number of contributions. That number is learned from the first backward pass and, separately,
from the first deferred products of a micro-batch. Before it is known, a unit counts as complete as soon as the next
unit in the order receives a contribution. Contributions that come after that are reduced separately at the end, which
gives the same sum.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Pending
from megatron.core.distributed.buckets import TwoLevelReduction
from megatron.core.distributed.exact_sums import ExactSum, FixedPoint
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.main_grad import zero_or_mark
from megatron.core.exceptions import UserError
from megatron.core.parameters import info_of
from megatron.core.utils.torch_private import BackwardEndCallback


def small_bytes(sizes: Sequence[int]) -> int:
    """Returns the bytes of whole gradients up to which a unit is small, from those of all units."""
    return max(sizes, default=0) // 64


class TransientGradients:
    """The whole gradients of one unit, which have memory only while needed, and this rank's shard of their sum."""

    def __init__(
        self,
        unit: Unit,
        shard: Tensor,
        reduction: TwoLevelReduction,
        wire_dtype: torch.dtype,
        exact: FixedPoint | None = None,
    ) -> None:
        self.unit = unit
        self.shard = shard
        self.reduction = reduction
        self.wire_dtype = wire_dtype
        self.whole = torch.empty(unit.plan.numel, dtype=unit.plan.grad_dtype, device=unit.device)
        self.nbytes = self.whole.untyped_storage().nbytes()
        """Bytes of the whole gradients while they have memory."""
        self.num_accumulated = 0
        """Number of contributions in the whole gradients."""
        self.seen = 0
        """Number of contributions in this backward pass, or from the deferred products that are being computed."""
        self.expected: dict[bool, int] = {}
        """The total number of contributions, once it is known. Keys: False for a backward pass, True for deferred
        products."""
        self._sum: Pending | None = None
        self.exact = None if exact is None else ExactSum(exact, shard.numel(), unit.device)
        """The shard's sum over micro-batches; None: they are added to the shard."""

    def open(self) -> None:
        """Allocates the whole gradients, which count as zeros, before a contribution is written."""
        self.finish()
        if self.whole.untyped_storage().nbytes() == 0:
            self.whole.untyped_storage().resize_(self.nbytes)
            zero_or_mark(self.whole, self.unit.main_grads)

    def start(self) -> None:
        """Starts the reduce-scatter over the ranks that shard the unit."""
        if not self.num_accumulated:  # other ranks may have contributions
            self.open()
        for main_grad in self.unit.main_grads:
            main_grad.zero_outdated()
        self.num_accumulated = 0
        if self.exact is None:
            self._sum = self.reduction.data.start_reduce_scatter(self.whole, self.wire_dtype)
            return
        whole = torch.zeros(self.whole.shape, dtype=self.exact.total.dtype, device=self.whole.device)
        self.exact.number.add(self.whole, whole, self.exact.is_bad)
        self._sum = self.reduction.data.start_reduce_scatter(whole, whole.dtype)

    def finish(self) -> None:
        """Waits for a running reduction, adds its result to the shard, and frees the whole gradients."""
        if self._sum is not None:
            total = self.shard if self.exact is None else self.exact.total
            total.add_(self._sum.wait())
            self._sum = None
            self.whole.untyped_storage().resize_(0)

    def read_exact_sum(self) -> None:
        """Writes the exact sum to the shard, if there is one."""
        if self.exact is not None:
            self.exact.number.read(self.exact.total, self.shard)

    def discard(self) -> None:
        """Drops gradients that are not reduced."""
        self.finish()
        self.whole.untyped_storage().resize_(0)
        self.num_accumulated = self.seen = 0
        if self.exact is not None:
            self.exact.reset()


@dataclass(frozen=True)
class GradientShards:
    """This rank's gradient shards of all units of one grid and type, concatenated."""

    flat: Tensor
    reduction: TwoLevelReduction
    wire_dtype: torch.dtype


class ReduceScatterGradients:
    """The gradients of those units of a model chunk that are reduced after every micro-batch."""

    def __init__(
        self,
        units: Sequence[Unit],
        reductions: Mapping[str, TwoLevelReduction],
        wire_dtype: Callable[[Unit], torch.dtype],
        overlap: bool,
        exact: FixedPoint | None = None,
    ) -> None:
        self.overlap = overlap
        self.shards: list[GradientShards] = []
        self.units: list[TransientGradients] = []
        """The gradients of each unit, in the order of reduction."""
        parts = self._allocate_shards(units, reductions, wire_dtype)
        for unit in reversed(units):
            transient = TransientGradients(unit, parts[unit], reductions[unit.plan.grid], wire_dtype(unit), exact)
            self._bind(unit, transient)
        self._next = 0
        """Index in `units` of the first one that is not yet reduced in this micro-batch."""
        self._reducing: list[TransientGradients] = []
        """Units whose reduction has begun and has not been waited for, the oldest first."""
        self._small_bytes = small_bytes([transient.nbytes for transient in self.units])
        self._backward_end = BackwardEndCallback(self._backward_ended)
        self._defers = False
        """Whether weight gradients are being deferred, so that no unit is complete."""
        self._computes_deferred = False
        """Whether deferred weight gradients are being computed."""
        self._finished = False

    def _allocate_shards(
        self,
        units: Sequence[Unit],
        reductions: Mapping[str, TwoLevelReduction],
        wire_dtype: Callable[[Unit], torch.dtype],
    ) -> dict[Unit, Tensor]:
        kinds: dict[tuple[str, torch.dtype], list[Unit]] = {}
        for unit in units:
            kinds.setdefault((unit.plan.grid, unit.plan.dtype), []).append(unit)
        parts: dict[Unit, Tensor] = {}
        for (grid, _), alike in kinds.items():
            sizes = [unit.weight_shard.numel() for unit in alike]
            flat = torch.zeros(sum(sizes), dtype=alike[0].plan.grad_dtype, device=alike[0].device)
            parts |= zip(alike, flat.split(sizes), strict=True)
            self.shards.append(GradientShards(flat, reductions[grid], wire_dtype(alike[0])))
        return parts

    def _bind(self, unit: Unit, transient: TransientGradients) -> None:
        number = len(self.units)

        def before_write() -> None:
            self._open(number)

        def on_accumulated(parameter: nn.Parameter) -> None:
            self._on_accumulated(number, parameter)

        self.units.append(transient)
        factor = transient.reduction.contribution_factor
        unit.bind_gradients(transient.whole, transient.shard, on_accumulated, before_write, factor)
        transient.discard()  # views can be made only of a tensor with memory

    # Contributions ---------------------------------------------------------------------------------------------------

    def _open(self, number: int) -> None:
        transient = self.units[number]
        if self._next == 0:
            self._finish_reducing()  # the last one of the previous micro-batch, which overlapped a forward
        if not self._defers and self._computes_deferred not in transient.expected:
            # Before memory is allocated: units that count as complete make room.
            self._start_while(lambda other: other.seen > 0, number)
        transient.open()

    def _on_accumulated(self, number: int, parameter: nn.Parameter) -> None:
        if self._finished:
            raise RuntimeError(
                f"a gradient of {info_of(parameter).name} came after the step's reductions were finished: "
                "zero_grad_buffer() was not called before this step"
            )
        transient = self.units[number]
        transient.num_accumulated += 1
        transient.seen += 1
        self._backward_end.expect()
        if not self._defers and self._computes_deferred in transient.expected:
            self._start_while(lambda other: other.seen >= other.expected[self._computes_deferred], len(self.units))

    def _start_while(self, complete: Callable[[TransientGradients], bool], stop: int) -> None:
        while self._next < stop and complete(self.units[self._next]):
            self._start(self.units[self._next])
            self._next += 1

    def _start(self, transient: TransientGradients) -> None:
        # Beside the unit that backward writes, one reduction has memory, and small ones: the norm before the head does
        # not wait for the head's.
        if transient.nbytes > self._small_bytes:
            self._finish_reducing()
        transient.start()
        self._reducing.append(transient)
        if not self.overlap:
            self._finish_reducing()

    def _finish_reducing(self) -> None:
        while self._reducing:
            self._reducing.pop(0).finish()

    def _backward_ended(self) -> None:
        if not self._defers:
            self._learn_and_flush()

    def _learn_and_flush(self) -> None:
        for transient in self.units:
            transient.expected[self._computes_deferred] = transient.seen
        self.flush()

    # Deferred products
    # ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Backward passes inside the context defer their weight gradients."""
        self._defers = True
        try:
            yield
        finally:
            self._defers = False
            self._reset_seen()

    @contextlib.contextmanager
    def computing_deferred(self) -> Iterator[None]:
        """Returns a context in which the caller computes the deferred weight gradients of one micro-batch. At its end
        the units are complete."""
        self._computes_deferred = True
        try:
            yield
            self._learn_and_flush()
        finally:
            self._computes_deferred = False

    # Steps -----------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Starts the remaining reductions of this micro-batch."""
        for transient in self.units[self._next :]:
            self._start(transient)
        for transient in self.units:
            if transient.num_accumulated:  # contributions that came after its reduction
                if transient.exact is not None:
                    raise UserError(
                        "--exact-data-parallel-sums rounds the gradient of a micro-batch once, and with sharded "
                        "gradients that of a weight which is used twice arrives in two parts: shard only the "
                        "optimizer's state (--use-distributed-optimizer), or untie the weight"
                    )
                self._start(transient)
        self._next = 0
        self._reset_seen()

    def _reset_seen(self) -> None:
        for transient in self.units:
            transient.seen = 0

    def flush_accumulated(self) -> None:
        """Starts the reduction of gradients that were added outside of a backward pass, if there are any."""
        if any(transient.num_accumulated for transient in self.units):
            self.flush()

    def finish(self) -> None:
        """Waits until the shards have the sum of the step (on CUDA, later kernels wait)."""
        if self._finished:
            return
        self.flush_accumulated()
        self._finish_reducing()
        sums = [
            shards.reduction.replicas.start_all_reduce(shards.flat, shards.wire_dtype)
            for shards in self.shards
            if shards.reduction.replicas is not None
        ]
        for pending in sums:
            pending.wait()
        for transient in self.units:
            transient.read_exact_sum()
        self._finished = True

    def reset(self) -> None:
        """Zeroes the gradients for the next step."""
        for transient in self.units:
            transient.discard()
        for shards in self.shards:
            shards.flat.zero_()
        self._reducing, self._next, self._finished = [], 0, False
