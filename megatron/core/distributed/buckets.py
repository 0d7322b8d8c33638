"""Buckets: neighbouring units whose gradients are reduced together, once in each step.

All ranks reduce buckets in the same fixed order, last units first. Backward finishes them in this order too. With
overlap, the reduction of a bucket starts as soon as it has received all contributions and the buckets before it have
started. The number of contributions is learned from the first step (a weight that is used twice has two); in that step
all reductions start at the end.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.communication.collectives import Pending
from megatron.core.distributed.exact_sums import ExactSum, FixedPoint
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.main_grad import BufferMainGrad, zero_or_mark
from megatron.core.distributed.reductions import Reduction
from megatron.core.parameters import info_of
from megatron.core.utils.torch_private import BackwardEndCallback
from megatron.core.utils.warn import warn_on_first_rank


@dataclass(frozen=True)
class TwoLevelReduction:
    """How gradients of one grid are summed over data parallel ranks: one reduction, or two if shards are replicated."""

    data: Reduction
    """Sums over all data parallel ranks; with several instances of the shards, over the ranks of one instance."""
    replicas: Reduction | None = None
    """Then sums over the ranks that have the same shard; None with one instance."""
    contribution_factor: float = 1.0
    """Factor of each contribution to a main gradient. It replaces `data.scale` where `data` has one rank and would read
    and write all gradients only to scale them."""


class Bucket:
    """The gradients of some units in one buffer, and the state of their reduction.

    Replicated units are summed by one all-reduce of the buffer, sharded units by a reduce-scatter each. With `exact`
    the buffer has the gradients of one micro-batch, and their exact sum is reduced.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        reduction: TwoLevelReduction,
        wire_dtype: torch.dtype,
        exact: FixedPoint | None = None,
    ) -> None:
        self.units = list(units)
        self.reduction = reduction
        self.wire_dtype = wire_dtype
        self.main_grads: list[BufferMainGrad] = []
        """The accumulators of all parameters, in the order of the buffer."""
        numel = sum(unit.plan.numel for unit in units)
        self.grad_buffer = torch.zeros(numel, dtype=units[0].plan.grad_dtype, device=units[0].device)
        self.exact = None if exact is None else ExactSum(exact, numel, units[0].device)
        """The sum over micro-batches; None: gradients of all micro-batches are added to the buffer."""
        self.holds_micro_batch = False
        """Whether the buffer has gradients that `exact` lacks."""
        self.after_start: list[Callable[[], None]] = []
        """Called when the reduction has started."""
        self.num_accumulated = 0
        """Number of contributions so far from the last micro-batch of a step, which may start reductions."""
        self.expected: int | None = None
        """Number of contributions in the last micro-batch of a step; None until it is known."""
        self.started = False
        self.is_finished = False
        """Whether the gradients are summed."""
        self._sums: list[Pending] = []
        self._replica_sums: list[Pending] = []

    @property
    def is_ready(self) -> bool:
        """Whether all contributions have arrived. False until their number is known."""
        return self.expected is not None and self.num_accumulated >= self.expected

    @property
    def is_sharded(self) -> bool:
        """Whether a rank gets the sum of its shard only."""
        return self.units[0].sharding.shards > 1

    def start(self) -> None:
        """Starts the reduction. No gradient may be added after this until `reset`."""
        self.started = True
        self.zero_outdated()
        self.end_micro_batch()
        gradients, wire_dtype = self.grad_buffer, self.wire_dtype
        if self.exact is not None:
            gradients, wire_dtype = self.exact.total, self.exact.total.dtype
        if self.is_sharded:
            of_units = gradients.split([unit.plan.numel for unit in self.units])
            self._sums = [self.reduction.data.start_reduce_scatter(part, wire_dtype) for part in of_units]
        else:
            self._sums = [self.reduction.data.start_all_reduce(gradients, wire_dtype)]
        for action in self.after_start:
            action()

    def end_micro_batch(self) -> None:
        """Adds the gradients of a micro-batch to the exact sum, if there is one."""
        if self.exact is not None and self.holds_micro_batch:
            self.exact.take(self.grad_buffer)
        self.holds_micro_batch = False

    def advance(self) -> None:
        """Waits for the sums over an instance, and starts those over its replicas."""
        sums = [pending.wait() for pending in self._sums]
        self._sums = []
        if not self.is_sharded:
            if self.exact is not None and sums:
                self.exact.number.read(sums[0], self.grad_buffer)
            return
        for unit, shard in zip(self.units, sums, strict=True) if sums else ():
            if self.exact is not None:
                self.exact.number.read(shard, unit.gradient_shard)
            elif shard.data_ptr() != unit.gradient_shard.data_ptr():
                unit.gradient_shard.copy_(shard)
            if self.reduction.replicas is not None:
                self._replica_sums.append(
                    self.reduction.replicas.start_all_reduce(unit.gradient_shard, self.wire_dtype)
                )

    def finish(self) -> None:
        """Waits until the units' shards have the sum (on CUDA, later kernels wait)."""
        self.advance()
        for pending in self._replica_sums:
            pending.wait()
        self._replica_sums = []
        self.is_finished = self.started

    def zero_outdated(self) -> None:
        """Zeroes the gradients that only count as zero."""
        for main_grad in self.main_grads:
            main_grad.zero_outdated()

    def reset(self) -> None:
        """Begins a step: all gradients are zero, or count as zero."""
        self.finish()
        # Only experts: for other weights it would save a quarter of a percent, and scripts may read their zeros.
        experts = [each for each in self.main_grads if info_of(each.parameter).grid == "expert"]
        zero_or_mark(self.grad_buffer, () if self.exact is not None else experts)
        if self.exact is not None:
            self.exact.reset()
        self.num_accumulated = 0
        self.holds_micro_batch = self.started = self.is_finished = False


class BucketQueue:
    """The buckets of a model chunk, in the order of reduction."""

    def __init__(self, buckets: Sequence[Bucket], overlap: bool) -> None:
        self.buckets = list(buckets)
        self.overlap = overlap
        self.waits_for_end = False
        """Whether reductions wait for the end of the backward although they could overlap it."""
        self._is_paused = False
        self._backward_end = BackwardEndCallback(self._backward_ended)
        for bucket in self.buckets:
            self._bind(bucket)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the context no reduction starts: for all micro-batches of a step except the last."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _bind(self, bucket: Bucket) -> None:
        def on_accumulated(parameter: nn.Parameter) -> None:
            self._on_accumulated(bucket, parameter)

        offset = 0
        for unit in bucket.units:
            buffer = bucket.grad_buffer[offset : offset + unit.plan.numel]
            shard, factor = buffer[slice(*unit.shard_range)], bucket.reduction.contribution_factor
            unit.bind_gradients(buffer, shard, on_accumulated, factor=factor)
            bucket.main_grads += unit.main_grads
            offset += unit.plan.numel

    def _on_accumulated(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        if bucket.is_finished and not (self.overlap or bucket.is_sharded):  # as Megatron-LM does
            warn_on_first_rank(
                "zero_grad_buffer() was not called between two steps: gradients are added to those of earlier steps"
            )
            bucket.started, bucket.is_finished, bucket.num_accumulated = False, False, 0
        if bucket.started:
            raise RuntimeError(
                f"a gradient of {info_of(parameter).name} came after its reduction had begun: either "
                "zero_grad_buffer() was not called before this step, or this step uses the parameter more often than "
                "an earlier one did, which overlap_grad_reduce cannot know"
            )
        bucket.holds_micro_batch = True
        if bucket.exact is not None:
            self._backward_end.expect()
        if not self._is_paused:
            bucket.num_accumulated += 1
            if self.overlap and not self.waits_for_end and bucket.is_ready:
                self._start(only_ready=True)

    def _backward_ended(self) -> None:
        for bucket in self.buckets:
            if not bucket.started:
                bucket.end_micro_batch()

    def _start(self, only_ready: bool) -> None:
        previous: Bucket | None = None
        for bucket in self.buckets:
            if not bucket.started:
                if only_ready and not bucket.is_ready:
                    return
                bucket.start()
                if previous is not None and previous.reduction.replicas is not None:
                    previous.advance()
            previous = bucket

    def start(self) -> None:
        """Starts all reductions that have not started."""
        self._start(only_ready=False)

    def finish(self) -> None:
        """Waits for all reductions, and starts those that have not started."""
        self.start()
        had_backward = any(
            bucket.num_accumulated for bucket in self.buckets
        )  # otherwise there is nothing to learn from
        for bucket in self.buckets:
            bucket.finish()
            if had_backward:
                bucket.expected = max(bucket.num_accumulated, bucket.expected or 0)

    def zero_outdated(self) -> None:
        """Zeroes the gradients that only count as zero."""
        for bucket in self.buckets:
            bucket.zero_outdated()

    def reset(self) -> None:
        """Begins a step: all gradients are zero, or count as zero."""
        for bucket in self.buckets:
            bucket.reset()


def make_buckets(
    units: Sequence[Unit],
    reductions: Mapping[str, TwoLevelReduction],
    max_elements: int | None,
    wire_dtype: Callable[[Unit], torch.dtype],
    exact: FixedPoint | None = None,
) -> list[Bucket]:
    """Returns buckets of neighbouring units of one grid and type, last units first.

    A bucket has at most `max_elements` elements, but at least one unit. None sets no limit. `exact` are the numbers in
    which gradients are summed exactly.
    """
    buckets: list[Bucket] = []
    group: list[Unit] = []

    def close() -> None:
        if group:
            buckets.append(Bucket(group, reductions[group[0].plan.grid], wire_dtype(group[0]), exact))
            group.clear()

    for unit in reversed(units):
        alike = group and (group[0].plan.grid, group[0].plan.dtype) == (unit.plan.grid, unit.plan.dtype)
        full = max_elements is not None and sum(u.plan.numel for u in group) + unit.plan.numel > max_elements
        if not alike or full:
            close()
        group.append(unit)
    close()
    return buckets


def wire_dtype_of(unit: Unit, reduce_in_main_dtype: bool) -> torch.dtype:
    """Returns the type in which a unit's gradients are communicated."""
    return unit.plan.main_dtype if reduce_in_main_dtype else unit.plan.dtype
