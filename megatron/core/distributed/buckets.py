"""Buckets: neighbouring units whose gradients are reduced once a step, and when that happens.

All ranks reduce buckets in one fixed order, the last units first, as backward finishes them. With overlap a bucket goes
out once all contributions to it have arrived and those before it are out. How many contributions there are (a weight
that is used twice has two) is learned from the first reduced step: until it is known, buckets go out at the end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.reductions import PendingReduction, Reduction
from megatron.core.parameters import info_of


@dataclass(frozen=True)
class Reductions:
    """How gradients of one grid are summed over data parallel ranks."""

    data: Reduction
    """Over all ranks, or over those of one instance, where units are sharded."""
    replicas: Reduction | None = None
    """Then, where there are several instances: over the ranks that own the same range."""


class Bucket:
    """Gradients of some units in one buffer, and the state of their reduction.

    Replicated units are summed by one all-reduce of the buffer; of sharded ones each rank gets the sum of its ranges.
    """

    def __init__(self, units: Sequence[Unit], reductions: Reductions, wire_dtype: torch.dtype) -> None:
        self.units = list(units)
        self.reductions = reductions
        self.wire_dtype = wire_dtype
        numel = sum(unit.plan.numel for unit in units)
        self.grad_buffer = torch.zeros(numel, dtype=units[0].plan.main_dtype, device=units[0].device)
        self.num_accumulated = 0
        """Contributions since reductions were last allowed to start."""
        self.expected: int | None = None
        """Contributions of a step's last micro-batch, once seen."""
        self.started = False
        self._sums: list[PendingReduction] = []
        self._replica_sums: list[PendingReduction] = []

    @property
    def is_ready(self) -> bool:
        return self.expected is not None and self.num_accumulated >= self.expected

    @property
    def _is_sharded(self) -> bool:
        return self.units[0].sharding.shards > 1

    def start(self) -> None:
        """Begin the sum over the group. Nothing may land after this until `reset`."""
        self.started = True
        if self._is_sharded:
            self._sums = [self.reductions.data.start_part(unit.grad_buffer, self.wire_dtype) for unit in self.units]
        else:
            self._sums = [self.reductions.data.start_whole(self.grad_buffer, self.wire_dtype)]

    def advance(self) -> None:
        """Wait for the sums over an instance, and begin those over its replicas."""
        sums = [pending.wait() for pending in self._sums]
        self._sums = []
        if not self._is_sharded:
            return
        for unit, part in zip(self.units, sums, strict=True) if sums else ():
            if part.data_ptr() != unit.owned_gradients.data_ptr():
                unit.owned_gradients.copy_(part)
            if self.reductions.replicas is not None:
                self._replica_sums.append(self.reductions.replicas.start_whole(unit.owned_gradients, self.wire_dtype))

    def finish(self) -> None:
        """Wait until the sum is where the units own it (on CUDA: order later kernels behind it)."""
        self.advance()
        for pending in self._replica_sums:
            pending.wait()
        self._replica_sums = []

    def reset(self) -> None:
        """Zero the gradients, for the next step."""
        self.finish()
        self.grad_buffer.zero_()
        self.num_accumulated = 0
        self.started = False


class BucketQueue:
    """All buckets of a model chunk that are reduced once a step, in that order."""

    def __init__(self, buckets: Sequence[Bucket], overlap: bool) -> None:
        self.buckets = list(buckets)
        self.overlap = overlap
        self.may_start = True
        """False while micro-batches other than the last add their part."""
        for bucket in self.buckets:
            self._bind(bucket)

    def _bind(self, bucket: Bucket) -> None:
        def on_accumulated(parameter: nn.Parameter) -> None:
            self._on_accumulated(bucket, parameter)

        offset = 0
        for unit in bucket.units:
            whole = bucket.grad_buffer[offset : offset + unit.plan.numel]
            unit.bind_gradients(whole, whole[slice(*unit.owned_range)], on_accumulated)
            offset += unit.plan.numel

    def _on_accumulated(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        if bucket.started:
            raise RuntimeError(
                f"a gradient of {info_of(parameter).name} came after its reduction had begun: either "
                "zero_grad_buffer() was not called before this step, or this step uses the parameter more often than "
                "an earlier one did, which overlap_grad_reduce cannot know"
            )
        if self.may_start:
            bucket.num_accumulated += 1
            if self.overlap and bucket.is_ready:
                self._start(only_ready=True)

    def _start(self, only_ready: bool) -> None:
        previous: Bucket | None = None
        for bucket in self.buckets:
            if not bucket.started:
                if only_ready and not bucket.is_ready:
                    return
                bucket.start()
                if previous is not None and previous.reductions.replicas is not None:
                    previous.advance()
            previous = bucket

    def start(self) -> None:
        """Begin all reductions that have not begun."""
        self._start(only_ready=False)

    def finish(self) -> None:
        """Wait for all reductions, beginning those that have not begun."""
        self.start()
        went_through = any(
            bucket.num_accumulated for bucket in self.buckets
        )  # else there was no backward to learn from
        for bucket in self.buckets:
            bucket.finish()
            if went_through:
                bucket.expected = max(bucket.num_accumulated, bucket.expected or 0)

    def reset(self) -> None:
        """Zero all gradients."""
        for bucket in self.buckets:
            bucket.reset()


def make_buckets(
    units: Sequence[Unit],
    reductions: Mapping[str, Reductions],
    max_elements: int | None,
    wire_dtype: Callable[[Unit], torch.dtype],
) -> list[Bucket]:
    """Cut units, last first, into buckets of at most `max_elements` (one unit at least; None: no limit) of one kind."""
    buckets: list[Bucket] = []
    run: list[Unit] = []

    def close() -> None:
        if run:
            buckets.append(Bucket(run, reductions[run[0].plan.grid], wire_dtype(run[0])))
            run.clear()

    for unit in reversed(units):
        alike = run and (run[0].plan.grid, run[0].plan.dtype) == (unit.plan.grid, unit.plan.dtype)
        full = max_elements is not None and sum(u.plan.numel for u in run) + unit.plan.numel > max_elements
        if not alike or full:
            close()
        run.append(unit)
    close()
    return buckets


def wire_dtype_of(unit: Unit, reduce_in_main_dtype: bool) -> torch.dtype:
    """The type in which a unit's gradients are sent."""
    return unit.plan.main_dtype if reduce_in_main_dtype else unit.plan.dtype
