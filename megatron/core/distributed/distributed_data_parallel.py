"""DistributedDataParallel: every rank of a data parallel group computes on its own micro-batches, one model for all."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.collectives import broadcast
from megatron.core.distributed.buckets import Bucket, BucketQueue, Reduction, make_buckets
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.placements import placement_of
from megatron.core.distributed.replicas import data_parallel_group
from megatron.core.distributed.units import Unit, plan_units
from megatron.core.process_groups_config import ProcessGroupCollection, default_collection


class DistributedDataParallel(nn.Module):
    """Wraps a model chunk: its weights move into units' flat buffers, its gradients into buckets that are summed.

    After `finish_grad_sync` every parameter's `main_grad` holds the mean over data (and context) parallel ranks of what
    they accumulated since `zero_grad_buffer`; with `config.calculate_per_token_loss`, the sum. Gradients are
    accumulated in float32 at least, and summed in it with `ddp_config.grad_reduce_in_fp32`, else in the model's type.
    Replicas stay equal to the bit. `param.grad` is never left set.

    Leave all micro-batches of a step but the last under `no_sync`. With `ddp_config.overlap_grad_reduce` sums begin
    while the last backward is under way; the result is the same to the bit.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.pg_collection = (pg_collection or default_collection()).freeze()
        placement = placement_of(ddp_config)
        self.units = [Unit(plan, placement) for plan in plan_units(module)]
        buckets = make_buckets(
            self.units,
            self._reductions(),
            None if disable_bucketing else self._bucket_elements(),
            ddp_config.grad_reduce_in_fp32,
        )
        self._queue = BucketQueue(buckets, ddp_config.overlap_grad_reduce)
        self._offloaded: dict[Bucket, Tensor] = {}

    def _bucket_elements(self) -> int:
        """Large enough for the bandwidth of a ring of all ranks, small enough to begin early."""
        return self.ddp_config.bucket_size or max(40_000_000, 1_000_000 * self.pg_collection.size("dp_cp"))

    def _reductions(self) -> dict[str, Reduction]:
        groups = self.pg_collection
        replicas = groups.size("dp_cp")
        per_token = getattr(self.config, "calculate_per_token_loss", False)
        # Experts are reduced over fewer ranks, but their gradients are sums over the tokens of all: one scale.
        scale = 1.0 if per_token else 1.0 / replicas
        average = self.ddp_config.average_in_collective and not per_token
        reductions = {}
        for grid in {unit.plan.grid for unit in self.units}:
            name = data_parallel_group(grid)
            # A group is made when it is first read: not where there is nothing to reduce.
            group = getattr(groups, name) if groups.size(name) > 1 else None
            reductions[grid] = Reduction(group, scale, average)
        return reductions

    # The model -------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped model's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the wrapped model. `assign` must be False: the parameters are views of the units' buffers."""
        assert not assign
        return self.module.load_state_dict(state_dict, strict=strict)

    # Gradients -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches whose backward runs in here add to the gradients and start no reduction."""
        self._queue.may_start = False
        try:
            yield
        finally:
            self._queue.may_start = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Begin all reductions now; no gradient may be added afterwards."""
        self._queue.start()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce what is not reduced yet, and wait. On CUDA the host does not wait, later kernels do.

        `force_all_reduce` asks for whole gradients on every rank where the placement would shard them; a replicated
        placement always gives them.
        """
        self._queue.finish()

    def zero_grad_buffer(self) -> None:
        """Begin a step: zero all gradients."""
        self._queue.reset()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients by a number, or by a scalar tensor on their device."""
        for bucket in self._queue.buckets:
            bucket.grad_buffer.mul_(scaling_factor)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Move gradients to host memory and free the device's, until `restore_grad_buffers`."""
        for bucket in self._queue.buckets:
            buffer = bucket.grad_buffer
            self._offloaded[bucket] = buffer.to("cpu", copy=True)
            buffer.untyped_storage().resize_(0)
        if torch.cuda.is_available() and empty_cache:
            torch.cuda.empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Undo `offload_grad_buffers`."""
        for bucket, held in self._offloaded.items():
            bucket.grad_buffer.untyped_storage().resize_(held.nbytes)
            bucket.grad_buffer.copy_(held)
        self._offloaded.clear()

    # Weights ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Give all data parallel ranks the weights of the first. Only models with weights of their own making need it:
        ours start equal on every rank."""
        for unit in self.units:
            name = data_parallel_group(unit.plan.grid)
            if self.pg_collection.size(name) > 1:
                broadcast(unit.param_buffer, getattr(self.pg_collection, name))

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather weights that the update left sharded. A replicated placement leaves none."""

    def enable_forward_pre_hook(self) -> None:
        """Wait for gathered weights before each forward. A replicated placement gathers none."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Undo `enable_forward_pre_hook`."""
