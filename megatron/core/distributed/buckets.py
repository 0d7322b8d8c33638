"""Buckets: neighbouring units whose gradients are reduced in one collective, and when that happens.

All ranks reduce buckets in one fixed order, the last units first, as backward finishes them. With overlap a bucket goes
out once all contributions to it have landed and those before it are out. How many contributions there are (a weight
that is used twice has two) is learned from the first reduced step: until it is known, buckets go out at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from megatron.core.collectives import Group, Pending, averages_in_collective, group_size, start_all_reduce
from megatron.core.distributed.units import Unit
from megatron.core.parameters import info_of


@dataclass(frozen=True)
class Reduction:
    """How gradients of one grid are summed over data parallel ranks."""

    group: Group
    scale: float
    """Multiplies gradients before the sum."""
    average_in_collective: bool = False
    """Leave the part of the scale that is 1 / (size of the group) to the collective, where the backend can do it."""


class Bucket:
    """Gradients of some units in one buffer, and the state of their reduction."""

    def __init__(self, units: Sequence[Unit], reduction: Reduction, wire_dtype: torch.dtype) -> None:
        self.units = list(units)
        self.reduction = reduction
        plan = units[0].plan
        numel = sum(unit.plan.numel for unit in units)
        self.wire_dtype = wire_dtype
        self.grad_buffer = torch.zeros(numel, dtype=plan.main_dtype, device=units[0].param_buffer.device)
        self.landed = 0
        """Contributions since reductions were last allowed to start."""
        self.expected: int | None = None
        """Contributions of a step's last micro-batch, once seen."""
        self.started = False
        self._work: Pending | None = None
        self._wire: Tensor | None = None

    @property
    def is_ready(self) -> bool:
        return self.expected is not None and self.landed >= self.expected

    def start(self) -> None:
        """Begin the sum over the group. Nothing may land after this until `reset`."""
        self.started = True
        group, scale = self.reduction.group, self.reduction.scale
        averaging = self.reduction.average_in_collective and averages_in_collective(self.grad_buffer, group)
        if averaging:
            scale *= group_size(group)
        if scale != 1.0:
            self.grad_buffer.mul_(scale)
        if group_size(group) == 1:
            return
        narrow = self.wire_dtype != self.grad_buffer.dtype
        self._wire = self.grad_buffer.to(self.wire_dtype) if narrow else self.grad_buffer
        self._work = start_all_reduce(self._wire, group, ReduceOp.AVG if averaging else ReduceOp.SUM)

    def finish(self) -> None:
        """Wait until the sum is in the buffer (on CUDA: order later kernels behind it)."""
        if self._work is not None:
            self._work.wait()
        if self._wire is not None and self._wire is not self.grad_buffer:
            self.grad_buffer.copy_(self._wire)
        self._work = self._wire = None

    def reset(self) -> None:
        """Zero the gradients, for the next step."""
        self.grad_buffer.zero_()
        self.landed = 0
        self.started = False


class BucketQueue:
    """All buckets of a model chunk, in the order in which they are reduced."""

    def __init__(self, buckets: Sequence[Bucket], overlap: bool) -> None:
        self.buckets = list(buckets)
        self.overlap = overlap
        self.may_start = True
        """False while micro-batches other than the last add their part."""
        for bucket in self.buckets:
            self._bind(bucket)

    def _bind(self, bucket: Bucket) -> None:
        def landed(parameter: nn.Parameter) -> None:
            self._landed(bucket, parameter)

        offset = 0
        for unit in bucket.units:
            unit.bind_gradients(bucket.grad_buffer[offset : offset + unit.plan.numel], landed)
            offset += unit.plan.numel

    def _landed(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        if bucket.started:
            raise RuntimeError(
                f"a gradient of {info_of(parameter).name} came after its reduction had begun: either "
                "zero_grad_buffer() was not called before this step, or this step uses the parameter more often than "
                "an earlier one did, which overlap_grad_reduce cannot know"
            )
        if self.may_start:
            bucket.landed += 1
            if self.overlap and bucket.is_ready:
                self._start(only_ready=True)

    def _start(self, only_ready: bool) -> None:
        for bucket in self.buckets:
            if bucket.started:
                continue
            if only_ready and not bucket.is_ready:
                return
            bucket.start()

    def start(self) -> None:
        """Begin all reductions that have not begun."""
        self._start(only_ready=False)

    def finish(self) -> None:
        """Wait for all reductions, beginning those that have not begun."""
        self.start()
        went_through = any(bucket.landed for bucket in self.buckets)  # else there was no backward to learn from
        for bucket in self.buckets:
            bucket.finish()
            if went_through:
                bucket.expected = max(bucket.landed, bucket.expected or 0)

    def reset(self) -> None:
        """Zero all gradients."""
        for bucket in self.buckets:
            bucket.reset()


def make_buckets(
    units: Sequence[Unit], reductions: dict[str, Reduction], max_elements: int | None, reduce_in_main_dtype: bool
) -> list[Bucket]:
    """Cut units, last first, into buckets of at most `max_elements` (one unit at least; None: no limit) of one kind."""
    buckets: list[Bucket] = []
    run: list[Unit] = []

    def close() -> None:
        if run:
            plan = run[0].plan
            wire = plan.main_dtype if reduce_in_main_dtype else plan.dtype
            buckets.append(Bucket(run, reductions[plan.grid], wire))
            run.clear()

    for unit in reversed(units):
        alike = run and (run[0].plan.grid, run[0].plan.dtype) == (unit.plan.grid, unit.plan.dtype)
        full = max_elements is not None and sum(u.plan.numel for u in run) + unit.plan.numel > max_elements
        if not alike or full:
            close()
        run.append(unit)
    close()
    return buckets
