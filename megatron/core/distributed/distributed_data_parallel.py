"""DistributedDataParallel: every rank of a data parallel group computes on its own micro-batches, one model for all."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.collectives import Group, broadcast
from megatron.core.dist_checkpointing.chunk import Chunk, parameter_chunk
from megatron.core.distributed.buckets import BucketQueue, Reductions, make_buckets, wire_dtype_of
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.main_grad import WeightGradientQueue
from megatron.core.distributed.meta_init import materialize, materialize_rest
from megatron.core.distributed.reduce_scatter_gradients import ReduceScatterGradients
from megatron.core.distributed.reductions import Reduction
from megatron.core.distributed.replicas import replica_ranks
from megatron.core.distributed.sharding_strategy import shardings
from megatron.core.distributed.units import ParameterSlice, UnitPlan, named_infos, plan_units
from megatron.core.distributed.weight_hooks import WeightHooks
from megatron.core.exceptions import UserError
from megatron.core.process_groups_config import ProcessGroupCollection, default_collection


class DistributedDataParallel(nn.Module):
    """Wraps a model chunk: its weights move into units' flat buffers, its gradients into buckets that are summed.

    After `finish_grad_sync` every parameter's `main_grad` holds the mean over data (and context) parallel ranks of what
    they accumulated since `zero_grad_buffer`; with `config.calculate_per_token_loss`, the sum. Where the strategy
    shards, that is so of what this rank owns of it: `unit.parameter_slices` of `unit.owned_gradients`. Gradients are
    accumulated in float32 at least, and summed in it with `ddp_config.grad_reduce_in_fp32`, else in the model's type.
    Replicas stay equal to the bit. `param.grad` is never left set.

    Leave all micro-batches of a step but the last under `no_sync`. With `ddp_config.overlap_grad_reduce` sums begin
    while the last backward is under way; the result is the same to the bit.

    A module that was built on the meta device gets memory on `device` (our own keyword; default: the current GPU, or
    the CPU) and its initial values, unit by unit.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.pg_collection = (pg_collection or default_collection()).freeze()
        self.shardings = shardings(ddp_config, self.pg_collection)
        plans = plan_units(module, {grid: sharding.shards for grid, sharding in self.shardings.items()})
        self.units = [self._unit(plan, device or _default_device()) for plan in plans]
        materialize_rest(module, device or _default_device(), config)
        reductions = {grid: self._reductions(grid) for grid in {plan.grid for plan in plans}}
        wire_dtype = functools.partial(wire_dtype_of, reduce_in_main_dtype=ddp_config.grad_reduce_in_fp32)
        by_step = [unit for unit in self.units if not unit.sharding.strategy.shards_gradients]
        by_micro_batch = [unit for unit in self.units if unit.sharding.strategy.shards_gradients]
        most = None if disable_bucketing else self._bucket_elements()
        self._queue = BucketQueue(make_buckets(by_step, reductions, most, wire_dtype), ddp_config.overlap_grad_reduce)
        self._shards = ReduceScatterGradients(by_micro_batch, reductions, wire_dtype, ddp_config.overlap_grad_reduce)
        gathered = [unit for unit in self.units if unit.sharding.shards > 1]
        self._hooks = WeightHooks(module, gathered, prefetch=ddp_config.overlap_param_gather)
        self._hooks.enable()
        self._offloaded: list[Tensor] = []
        self._late = WeightGradientQueue(slot.parameter for unit in self.units for slot in unit.slots)

    @property
    def device(self) -> torch.device:
        """Where the units lie; of an empty pipeline stage, where they would."""
        if self.units:
            return self.units[0].device
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def _group(self, name: str) -> Group:
        # A group is made when it is first read: not where there is nobody to talk to.
        return getattr(self.pg_collection, name) if self.pg_collection.size(name) > 1 else None

    def _unit(self, plan: UnitPlan, device: torch.device) -> Unit:
        for slot in plan.slots:
            materialize(slot.parameter, device, self.config)
        sharding = self.shardings[plan.grid]
        return Unit(plan, self.shardings, self._group(sharding.shard_group) if sharding.shards > 1 else None)

    def _bucket_elements(self) -> int:
        """Large enough for the bandwidth of a ring of all ranks, small enough to begin early."""
        return self.ddp_config.bucket_size or max(40_000_000, 1_000_000 * self.pg_collection.size("dp_cp"))

    def _reductions(self, grid: str) -> Reductions:
        sharding = self.shardings[grid]
        per_token = getattr(self.config, "calculate_per_token_loss", False)
        # Experts are reduced over fewer ranks, but their gradients are sums over the tokens of all: one scale.
        scale = 1.0 if per_token else 1.0 / self.pg_collection.size("dp_cp")
        average = self.ddp_config.average_in_collective and not per_token
        precise = self.ddp_config.reduce_scatter_with_fp32_accumulation
        if sharding.shards == 1:
            return Reductions(Reduction(self._group(sharding.data_group), scale, average))
        data = Reduction(self._group(sharding.shard_group), scale, average, precise)
        if sharding.instances == 1:
            return Reductions(data)
        return Reductions(data, Reduction(self._group(sharding.replica_group)))

    # The model -------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped model's own. Where parameters are sharded: copies of whole ones; all ranks call this together."""
        with self.whole_weights():
            state = self.module.state_dict(*args, **kwargs)
            if any(unit.shards_weights for unit in self.units):
                state.update({key: value.clone() for key, value in state.items() if isinstance(value, Tensor)})
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the wrapped model. `assign` must be False: the parameters are views of the units' buffers."""
        assert not assign
        with self.whole_weights():
            result = self.module.load_state_dict(state_dict, strict=strict)
            for unit in self.units:
                unit.keep_owned()
        return result

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """All parameters can be read in here, also where they are sharded: then all ranks enter together, and each has
        memory for all of this chunk. What is written to sharded ones is lost."""
        for unit in self.units:
            unit.start_gather()
        self.finish_param_sync()
        try:
            yield
        finally:
            self._hooks.release_unused()

    # Gradients -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches whose backward runs in here add to the gradients and start no reduction; except that sharded
        gradients are reduced with every micro-batch."""
        self._queue.may_start = False
        try:
            yield
        finally:
            self._queue.may_start = True

    @contextlib.contextmanager
    def defer_weight_gradients(self, key: Hashable) -> Iterator[None]:
        """A backward that runs in here gives input gradients only; the products that make weight gradients wait, under
        a key of the caller's, for `compute_weight_gradients`."""
        with self._shards.held(), self._late.defer(key):
            yield

    def compute_weight_gradients(self, key: Hashable) -> None:
        """Compute what was put off under a key."""
        with self._shards.late():
            self._late.compute(key)

    def deferred_weight_gradients(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """In a backward that runs in here the products that make weight gradients lag: they wait until the function
        that is given is called, or for the end of the backward."""
        return self._late.deferred()

    def start_grad_sync(self, *unused: Any) -> None:
        """Begin all reductions now; no gradient may be added afterwards."""
        self._queue.start()
        self._shards.flush_accumulated()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce what is not reduced yet, and wait. On CUDA the host does not wait, later kernels do.

        `force_all_reduce` asks for whole gradients on every rank also where each would own the sum of a part. Raises
        UserError where there is no memory for them, with sharded gradients.
        """
        self._queue.finish()
        self._shards.finish()
        if force_all_reduce:
            if self._shards.passing:
                raise UserError("force_all_reduce: sharded gradients are whole on no rank; shard the optimizer's state")
            for unit in self.units:
                unit.gather_gradients()

    def zero_grad_buffer(self) -> None:
        """Begin a step: zero all gradients."""
        self._queue.reset()
        self._shards.reset()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients by a number, or by a scalar tensor on their device."""
        for gradients in self._resident_gradients():
            gradients.mul_(scaling_factor)

    def _resident_gradients(self) -> list[Tensor]:
        """Flat tensors that have memory from step to step."""
        return [bucket.grad_buffer for bucket in self._queue.buckets] + [owned.flat for owned in self._shards.owned]

    def gradient_chunks(self) -> Iterator[Chunk]:
        """What this rank owns of every parameter's gradient, over live memory; to be read once they are finalised."""
        for unit in self.units:
            for parameter_slice in unit.parameter_slices:
                yield self._chunk(parameter_slice, parameter_slice.of(unit.owned_gradients), unit)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Move gradients to host memory and free the device's, until `restore_grad_buffers`."""
        for buffer in self._resident_gradients():
            self._offloaded.append(buffer.to("cpu", copy=True))
            buffer.untyped_storage().resize_(0)
        if torch.cuda.is_available() and empty_cache:
            torch.cuda.empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Undo `offload_grad_buffers`."""
        for buffer, held in zip(self._resident_gradients(), self._offloaded, strict=False):
            buffer.untyped_storage().resize_(held.nbytes)
            buffer.copy_(held)
        self._offloaded.clear()

    # Weights ---------------------------------------------------------------------------------------------------------

    def weight_chunks(self) -> Iterator[Chunk]:
        """The model's weights on this rank as checkpoint chunks over live memory: whole boxes, or where parameters are
        sharded, what this rank owns of them."""
        self.finish_param_sync()
        self._hooks.release_unused()  # whole weights would not know of values that are loaded into the parts
        for unit in self.units:
            for parameter_slice in unit.parameter_slices if unit.shards_weights else ():
                yield self._chunk(parameter_slice, parameter_slice.of(unit.owned_weights), unit)
        sharded = {s.parameter for u in self.units if u.shards_weights for s in u.slots}
        for parameter, info in named_infos(self.module):
            if parameter not in sharded:
                yield parameter_chunk(parameter, replica_ranks(info, self.pg_collection))

    def _chunk(self, parameter_slice: ParameterSlice, tensor: Tensor, unit: Unit) -> Chunk:
        info = parameter_slice.info
        holders = replica_ranks(info, self.pg_collection, unit.sharding)
        return Chunk(info.name, info.global_shape, info.box, parameter_slice.flat_range, tensor, holders)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Give all data parallel ranks the weights of the first. Only models with weights of their own making need it:
        ours start equal on every rank. Raises UserError where parameters are sharded: nobody has whole ones then."""
        for unit in self.units:
            group = self._group(unit.sharding.data_group)
            if group is not None:
                if unit.shards_weights:
                    raise UserError(
                        "broadcast_params: parameters are sharded; make ranks equal before they are wrapped"
                    )
                broadcast(unit.param_buffer, group)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather whole weights of units that were updated, in the order in which forward needs them.

        With `ddp_config.overlap_param_gather` modules wait for theirs as they come up, unless `force_sync`. Sharded
        parameters are gathered by their modules.
        """
        for unit in self.units:
            if not unit.shards_weights:
                unit.start_gather()
        if force_sync or not (self.ddp_config.overlap_param_gather and self._hooks.are_enabled):
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait for weights that are being gathered (on CUDA, kernels that come later do)."""
        for unit in self.units:
            unit.finish_gather()

    def enable_forward_pre_hook(self) -> None:
        """Let modules wait for weights that are being gathered, as they do from the start."""
        self._hooks.enable()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Wait for weights that are being gathered at once, from here on; so that parameters can be read at any time.
        Where they are sharded, they are still there only while their modules run."""
        if param_sync:
            self.finish_param_sync()
        if not any(unit.shards_weights for unit in self.units):
            self._hooks.disable()


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
