"""The memory of a unit on one rank: whole buffers, and the part of them that the rank owns.

Whole weights are one flat tensor that parameters are views of. Where parameters are sharded its storage is given back
and taken again around each use, the tensor staying the same object: what autograd saved of it is valid again as soon as
the weights are back.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from megatron.core.collectives import Group, Pending, start_gather_rows
from megatron.core.distributed.freed_parameter import mark_present, mark_released
from megatron.core.distributed.main_grad import attach_main_grad
from megatron.core.distributed.sharding_strategy import Sharding
from megatron.core.distributed.units import Slot, UnitPlan


class Unit:
    """A planned unit with its memory. Making one moves the parameters' values into its buffer."""

    def __init__(self, plan: UnitPlan, shardings: Mapping[str, Sharding], shard_group: Group = None) -> None:
        self.plan = plan
        self.shardings = shardings
        """Of this unit and of those of the other grid."""
        self.sharding = shardings[plan.grid]
        self.owned_range = self.sharding.owned_range(plan.numel)
        """Elements whose sum of gradients, optimizer state and update are this rank's."""
        self.parameter_slices = plan.parameter_slices(self.owned_range)
        self.device = plan.slots[0].parameter.device
        self.param_buffer = torch.zeros(plan.numel, dtype=plan.dtype, device=self.device)
        """[numel] in the model's type: whole weights, where the strategy keeps them or while they are gathered."""
        for slot in plan.slots:
            view = slot.shaped(self.param_buffer.data)
            view.copy_(slot.parameter.data)
            slot.parameter.data = view
        self.owned_weights = self._owned(self.param_buffer)
        """[owned] in the model's type: what this rank updates."""
        self._nbytes = self.param_buffer.untyped_storage().nbytes()
        self._shard_group = shard_group
        self._gather: Pending | None = None
        self._is_stale = False
        if self.shards_weights:
            self.owned_weights = self.owned_weights.clone()
            self.release()
        self.grad_buffer = torch.empty(0, dtype=plan.main_dtype, device=self.device)
        """[numel] of the main type: whole gradients, as this rank accumulates them."""
        self.owned_gradients = self.grad_buffer
        """[owned] of the main type: where their sum over data parallel ranks is found."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.plan.slots

    def _owned(self, buffer: Tensor) -> Tensor:
        return buffer[slice(*self.owned_range)]

    # Weights ---------------------------------------------------------------------------------------------------------

    @property
    def shards_weights(self) -> bool:
        """Whole weights come and go."""
        return self.sharding.strategy.shards_weights

    @property
    def has_buffer(self) -> bool:
        """There is memory for whole weights; while a gather is under way, not yet their values."""
        return self.param_buffer.untyped_storage().nbytes() > 0

    def mark_updated(self) -> None:
        """What this rank owns has new values; whole weights, if there are any, have old ones."""
        assert self._gather is None, f"{self} is updated while it is gathered"
        self._is_stale = self.sharding.shards > 1
        self.release()

    def start_gather(self) -> None:
        """Begin to bring whole weights together from what the ranks own, unless they are there."""
        if self._gather is not None or (self.has_buffer and not self._is_stale):
            return
        if not self.has_buffer:
            self.param_buffer.untyped_storage().resize_(self._nbytes)
        self._is_stale = False
        self._gather = start_gather_rows(self.owned_weights, self._shard_group, out=self.param_buffer)

    def finish_gather(self) -> None:
        """Wait for a gather that is under way; on CUDA, the kernels that come later do."""
        if self._gather is None:
            return
        self._gather.wait()
        self._gather = None
        if self.shards_weights:
            for slot in self.slots:
                mark_present(slot.parameter)

    def release(self) -> None:
        """Give the memory of whole weights back, where parameters are sharded."""
        if not self.shards_weights or not self.has_buffer:
            return
        self.finish_gather()  # which writes into this memory
        for slot in self.slots:
            mark_released(slot.parameter)
        self.param_buffer.untyped_storage().resize_(0)

    def keep_owned(self) -> None:
        """Take what this rank owns out of whole weights that were written from outside."""
        if self.shards_weights:
            self.owned_weights.copy_(self._owned(self.param_buffer))

    # Gradients -------------------------------------------------------------------------------------------------------

    def bind_gradients(
        self,
        buffer: Tensor,
        owned: Tensor,
        on_accumulated: Callable[[nn.Parameter], None],
        opened: Callable[[], None] | None = None,
    ) -> None:
        """Collect gradients in `buffer` ([numel] of the main type), calling `on_accumulated` for every contribution and
        `opened` before it is written. What this rank owns of the sum will be in `owned`."""
        assert buffer.shape == (self.plan.numel,) and buffer.dtype == self.plan.main_dtype
        self.grad_buffer, self.owned_gradients = buffer, owned
        for slot in self.slots:
            attach_main_grad(slot.parameter, slot.shaped(buffer), on_accumulated, opened)

    def gather_gradients(self) -> None:
        """Whole sums of gradients, on every rank, from what the ranks own of them."""
        if self.sharding.shards > 1:
            start_gather_rows(self.owned_gradients, self._shard_group, out=self.grad_buffer).wait()

    def __repr__(self) -> str:
        return f"Unit({self.plan.name}, {self.plan.grid}, {self.plan.dtype}, {self.plan.numel} elements)"
