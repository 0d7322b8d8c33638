"""DistributedDataParallel: each rank of a data parallel group trains the same model on its own micro-batches."""

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, broadcast
from megatron.core.communication.peer_rows import place_rows
from megatron.core.dist_checkpointing.chunk import Chunk, EncodedTensor, parameter_chunk
from megatron.core.distributed.buckets import BucketQueue, TwoLevelReduction, make_buckets, wire_dtype_of
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.exact_sums import MEANS, TOKEN_SUMS, FixedPoint, spread_bad_sums
from megatron.core.distributed.flat_buffer import ShardWeights, Unit
from megatron.core.distributed.fp8_unit import Fp8Unit, quantize_units
from megatron.core.distributed.main_grad import WeightGradientQueue
from megatron.core.distributed.meta_init import materialize, materialize_rest
from megatron.core.distributed.reduce_scatter_gradients import ReduceScatterGradients
from megatron.core.distributed.reductions import Reduction
from megatron.core.distributed.sharding_strategy import replica_ranks, sharded_weights, shardings
from megatron.core.distributed.units import ParameterSlice, UnitPlan, named_infos, plan_frozen_units, plan_units
from megatron.core.distributed.weight_file import FLAG, WeightFile
from megatron.core.distributed.weight_hooks import WeightHooks
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.fp8.linear import QuantizedWeights

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class DistributedDataParallel(nn.Module):
    """Wraps a model chunk: moves its weights into the flat buffers of units, and sums its gradients over ranks.

    After `finish_grad_sync` every parameter's `main_grad` has the mean over data (and context) parallel ranks of the
    gradients accumulated since `zero_grad_buffer`; with `config.calculate_per_token_loss`, their sum. If gradients or
    optimizer state are sharded, only this rank's shard of it is valid: `unit.parameter_slices` in
    `unit.gradient_shard`. Gradients are accumulated in float32 or wider, unless
    `ddp_config.main_grads_dtype` is the model's type. They are summed in the main type with
    `ddp_config.grad_reduce_in_fp32`, else in the model's type. Replicas stay equal to the bit. `param.grad` is None
    after backward.

    Run all micro-batches of a step but the last inside `no_sync`. With `ddp_config.overlap_grad_reduce` reductions
    start during the last backward, or after it if ranks share this micro-batch by dynamic context parallelism; the
    result is equal to the bit.

    A module that was built on the meta device gets memory on `device` (our own keyword; default: the current GPU, else
    the CPU) and its initial values, unit by unit.
    """

    def __init__(
        self,
        config: "TransformerConfig",
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
        self._disable_bucketing = disable_bucketing
        self.pg_collection = groups_or_default(pg_collection).freeze()
        self.shardings = shardings(ddp_config, self.pg_collection)
        shards = {grid: sharding.shards for grid, sharding in self.shardings.items()}
        plans = plan_units(module, shards, ddp_config.main_grads_dtype)
        frozen = plan_frozen_units(module, sharded_weights(self.shardings))
        self._quantized = [layer for layer in module.modules() if isinstance(layer, QuantizedWeights)]
        """Linear layers that keep quantised weights between micro-batches."""
        self._fp8_units: list[Fp8Unit] = []
        self._weight_file = self._open_weight_file([*frozen, *plans], device or _default_device())
        self.frozen_units = [self._unit(plan, device or _default_device()) for plan in frozen]
        """Frozen weights that ranks shard: no gradients, nor optimizer state."""
        self.units = [self._unit(plan, device or _default_device()) for plan in plans]
        materialize_rest(module, device or _default_device(), config)
        share_shards([unit for unit in self._all_units if not isinstance(unit, Fp8Unit)])
        grids = dict.fromkeys(plan.grid for plan in plans)  # in the same order on every rank, which may create groups
        reductions = {grid: self._reduction(grid, plans) for grid in grids}
        wire_dtype = functools.partial(wire_dtype_of, reduce_in_main_dtype=ddp_config.grad_reduce_in_fp32)
        by_step = [unit for unit in self.units if not unit.sharding.strategy.shards_gradients]
        by_micro_batch = [unit for unit in self.units if unit.sharding.strategy.shards_gradients]
        most = None if disable_bucketing else self._bucket_elements()
        buckets = make_buckets(by_step, reductions, most, wire_dtype, self._exact)
        self._queue = BucketQueue(buckets, ddp_config.overlap_grad_reduce)
        self._sharded_gradients = ReduceScatterGradients(
            by_micro_batch, reductions, wire_dtype, ddp_config.overlap_grad_reduce, self._exact
        )
        gathered = [unit for unit in self._all_units if unit.sharding.shards > 1]
        self._hooks = WeightHooks(module, gathered, prefetch=ddp_config.overlap_param_gather)
        self._hooks.enable()
        self._offloaded: list[Tensor] = []
        surrounding = [layer.around_forward for layer in self._quantized if layer.surrounds_forward]
        self._around_forward: Callable[[], AbstractContextManager[Any]] = (
            surrounding[0] if surrounding else contextlib.nullcontext
        )
        shards_weights = any(unit.shards_weights for unit in self._all_units)
        for layer in self._quantized:
            layer.adapt_to_data_parallel(self._gradient_scale, shards_weights)
        self._deferred_weight_gradients = WeightGradientQueue(
            slot.parameter for unit in self.units for slot in unit.slots
        )

    @property
    def device(self) -> torch.device:
        """Device of the units. An empty pipeline stage has that of the process: its GPU, else the CPU."""
        if self.units:
            return self.units[0].device
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def _all_units(self) -> list[Unit]:
        return [*self.frozen_units, *self.units]

    def _group(self, name: str) -> Group:
        # Reading the attribute creates the group, which a group of one rank does not need.
        return getattr(self.pg_collection, name) if self.pg_collection.size(name) > 1 else None

    def _open_weight_file(self, plans: Sequence[UnitPlan], device: torch.device) -> WeightFile | None:
        """Returns the file for the shards of sharded parameters; None: they are in memory."""
        folder = self.ddp_config.param_nvme_offload_path
        if folder is None or not plans:
            return None
        if self.ddp_config.fp8_param_gather:
            raise UserError(
                f"{FLAG} {folder}: weights that exist only in fp8 stay in memory: leave out fp8_param_gather"
            )
        sizes = [
            plan.numel // self.shardings[plan.grid].shards * plan.dtype.itemsize
            for plan in plans
            if self.shardings[plan.grid].strategy.shards_weights
        ]
        if not sizes:
            raise UserError(
                f"{FLAG} {folder}: no weights are sharded over ranks: give data_parallel_sharding_strategy "
                "optim_grads_params and at least two data parallel ranks"
            )
        return WeightFile(folder, self.pg_collection.global_rank, device, max(sizes))

    def _unit(self, plan: UnitPlan, device: torch.device) -> Unit:
        for slot in plan.slots:
            materialize(slot.parameter, device, self.config)
        sharding = self.shardings[plan.grid]
        group = self._group(sharding.shard_group) if sharding.shards > 1 else None
        if not (self.ddp_config.fp8_param_gather and plan.gathers_in_fp8):  # never for frozen weights
            return Unit(plan, self.shardings, group, self._weight_file)
        layers = {layer.own_weight: layer for layer in self._quantized}
        self._fp8_units.append(Fp8Unit(plan, self.shardings, group, layers, self._quantize_weights))
        return self._fp8_units[-1]

    def _quantize_weights(self) -> None:
        """Quantises the shards of weights that are gathered in fp8, if they have changed."""
        quantize_units([unit for unit in self._fp8_units if unit.is_changed])

    def _bucket_elements(self) -> int:
        """Returns the default bucket size: large enough for a ring over all ranks, small enough to start early."""
        return self.ddp_config.bucket_size or max(40_000_000, 1_000_000 * self.pg_collection.size("dp_cp"))

    @property
    def _per_token(self) -> bool:
        return getattr(self.config, "calculate_per_token_loss", False)

    @property
    def _exact(self) -> FixedPoint | None:
        """The numbers in which gradients are summed exactly; None: they are rounded by each addition."""
        if not self.ddp_config.exact_gradient_sums:
            return None
        return TOKEN_SUMS if self._per_token else MEANS

    @property
    def _gradient_scale(self) -> float:
        """The factor of each rank's gradients in the sum over ranks."""
        if self._exact is not None or self._per_token:  # the losses have the factor already, or it comes later
            return 1.0
        # Experts are reduced over fewer ranks, but their gradients are sums over the tokens of all ranks: one scale.
        return 1.0 / self.pg_collection.size("dp_cp")

    def _reduction(self, grid: str, plans: Sequence[UnitPlan]) -> TwoLevelReduction:
        sharding = self.shardings[grid]
        scale = self._gradient_scale
        average = self.ddp_config.average_in_collective and not self._per_token and self._exact is None
        precise = self.ddp_config.reduce_scatter_with_fp32_accumulation
        if sharding.shards == 1:
            group = self._group(sharding.data_group)
            slots = [slot for plan in plans if plan.grid == grid for slot in plan.slots]
            if group is None and not any(slot.info.is_added_to_directly for slot in slots):
                return TwoLevelReduction(Reduction(None), contribution_factor=scale)
            return TwoLevelReduction(Reduction(group, scale, average))
        data = Reduction(self._group(sharding.shard_group), scale, average, precise)
        if sharding.instances == 1:
            return TwoLevelReduction(data)
        return TwoLevelReduction(data, Reduction(self._group(sharding.replica_group)))

    # The model -------------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DistributedDataParallel":
        """Moves or converts the model, as `.to()` asks, and wraps it anew: gradients follow to its device and type.
        Raises UserError if ranks shard the model, its gradients or its optimizer state."""
        changed = any(_kind(fn(unit.param_buffer[:0])) != _kind(unit.param_buffer) for unit in self._all_units)
        if changed and any(unit.sharding.shards > 1 for unit in self._all_units):
            raise UserError("move the model to its device and type before DistributedDataParallel shards it")
        super()._apply(fn, recurse)
        if changed:
            training, given = self.training, (self.config, self.ddp_config, self.module, self._disable_bucketing)
            DistributedDataParallel.__init__(self, *given, self.pg_collection)
            self.train(training)
        return self

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module."""
        part = getattr(kwargs.get("tokens"), "part", None)
        # The ranks that share a micro-batch may compute further ones before they reduce gradients. A reduction that
        # waits for them must not come before the exchanges of keys that they wait for: NCCL may run them in turn.
        self._queue.waits_for_end = part is not None and part.group is not None
        with self._around_forward():
            return self.module(*inputs, **kwargs)

    def state_dict(self, *args: object, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the wrapped model's state dict. With sharded parameters it has copies of the whole ones, and all
        ranks must call this together."""
        with self.whole_weights():
            state = self.module.state_dict(*args, **kwargs)
            if any(unit.frees_parameters for unit in self._all_units):
                state.update({key: value.clone() for key, value in state.items() if isinstance(value, Tensor)})
        return state

    def state_dict_for_save_checkpoint(self, *args: object, **kwargs: object) -> dict[str, object]:
        """Megatron-LM's other name of `state_dict`."""
        return self.state_dict(*args, **kwargs)

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Returns the wrapped model's sharded state dict. Raises UserError if parameters are sharded or exist only in
        fp8: the model does not have the whole ones. `megatron.facades.checkpointing.save_checkpoint` saves them."""
        if any(unit.frees_parameters for unit in self._all_units):
            raise UserError(
                "sharded_state_dict(): not with sharded parameters or --fp8-param-gather; save_checkpoint() saves them"
            )
        return self.module.sharded_state_dict(*args, **kwargs)  # type: ignore[operator]

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False) -> object:
        """Loads into the wrapped model. `assign` must be False: the parameters are views of the units' buffers."""
        assert not assign
        with self.whole_weights():
            result = self.module.load_state_dict(state_dict, strict=strict)
            for unit in self._all_units:
                unit.copy_to_shard()
        for layer in self._quantized:
            layer.forget()
        return result

    @contextlib.contextmanager
    def whole_weights(self, names: Collection[str] | None = None) -> Iterator[None]:
        """All parameters, or those of the units that hold a parameter with one of these canonical names, can be read
        inside the context, even sharded ones and those that exist only in fp8. With such parameters all ranks must
        enter it together, and each rank needs memory for the whole units. Values that are written to such parameters
        are lost."""
        for unit in self._all_units:
            if names is not None and not any(slot.info.name in names for slot in unit.slots):
                continue
            if isinstance(unit, Fp8Unit):
                unit.gather_model_weights()
            else:
                unit.start_all_gather()
        self.finish_param_sync()
        try:
            yield
        finally:
            for in_fp8 in self._fp8_units:
                in_fp8.free_model_weights()
            self._hooks.reshard_unused()

    # Gradients -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the context accumulate gradients and start no reduction. Sharded gradients are the
        exception: they are reduced after every micro-batch."""
        with self._queue.paused():
            yield

    @contextlib.contextmanager
    def defer_weight_gradients(self, key: Hashable) -> Iterator[None]:
        """A backward inside the context computes input gradients only. Its weight gradients are deferred until
        `compute_weight_gradients` is called with the same key."""
        with self._sharded_gradients.deferring(), self._deferred_weight_gradients.defer(key):
            yield

    def compute_weight_gradients(self, key: Hashable) -> None:
        """Computes the weight gradients that were deferred under a key."""
        with self._sharded_gradients.computing_deferred():
            self._deferred_weight_gradients.compute(key)

    def deferred_weight_gradients(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Defers the weight gradients of a backward inside the context until the yielded function is called, or until
        the end of the backward."""
        return self._deferred_weight_gradients.deferred()

    def start_grad_sync(self, *unused: object) -> None:
        """Starts all reductions now; no gradient may be added afterwards."""
        self._queue.start()
        self._sharded_gradients.flush_accumulated()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Finishes all reductions. On CUDA the host does not wait, later kernels do.

        With `force_all_reduce` every rank gets the whole summed gradients, also where it would otherwise get only its
        shard. Raises UserError for it with sharded gradients: the whole ones have no memory.
        """
        self._queue.finish()
        self._sharded_gradients.finish()
        sums = [bucket.exact for bucket in self._queue.buckets]
        sums += [transient.exact for transient in self._sharded_gradients.units]
        flags = [each.is_bad for each in sums if each is not None]
        spread_bad_sums(flags, [unit.gradient_shard for unit in self.units], self._group("dp_cp"))
        if force_all_reduce:
            if self._sharded_gradients.units:
                raise UserError(
                    "force_all_reduce: with sharded gradients no rank has whole ones; shard only the optimizer's state"
                )
            for unit in self.units:
                unit.all_gather_gradients()

    def zero_grad_buffer(self) -> None:
        """Zeroes all gradients, at the start of a step. Those that the first product of a step replaces, experts'
        weights, keep the numbers of the step before until then, or until `finish_grad_sync`."""
        self._queue.reset()
        self._sharded_gradients.reset()

    def zero_outdated_gradients(self) -> None:
        """Zeroes the gradients that the first product of a step would replace. Call it after `zero_grad_buffer` if a
        CUDA graph adds the products, because every replay would replace."""
        self._queue.zero_outdated()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiplies all gradients by a number, or by a scalar tensor on their device."""
        for gradients in self._resident_gradients():
            gradients.mul_(scaling_factor)

    def _resident_gradients(self) -> list[Tensor]:
        """Returns the flat gradient tensors that keep their memory between steps."""
        return [bucket.grad_buffer for bucket in self._queue.buckets] + [
            shards.flat for shards in self._sharded_gradients.shards
        ]

    def gradient_chunks(self) -> Iterator[Chunk]:
        """Yields this rank's part of every parameter's gradient as checkpoint chunks that share its memory. Read them
        after `finalize_model_grads`."""
        for unit in self.units:
            for parameter_slice in unit.parameter_slices:
                yield self._chunk(parameter_slice, parameter_slice.view_in(unit.gradient_shard), unit)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Moves gradients to host memory and frees their device memory until `restore_grad_buffers`."""
        for buffer in self._resident_gradients():
            self._offloaded.append(buffer.to("cpu", copy=True))
            buffer.untyped_storage().resize_(0)
        if torch.cuda.is_available() and empty_cache:
            torch.cuda.empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Moves gradients back to the device after `offload_grad_buffers`."""
        for buffer, copy in zip(self._resident_gradients(), self._offloaded, strict=False):
            buffer.untyped_storage().resize_(copy.nbytes)
            buffer.copy_(copy)
        self._offloaded.clear()

    # Weights ---------------------------------------------------------------------------------------------------------

    def weight_chunks(self) -> Iterator[Chunk]:
        """Yields the model's weights on this rank as checkpoint chunks that share its memory: whole boxes, or this
        rank's shards of sharded parameters and of those that exist only in fp8. The latter are encoded, unless
        `hold_weight_shards` was called or the optimizer needs them in memory. Shards in a file are encoded too."""
        self.finish_param_sync()
        self._hooks.reshard_unused()  # values loaded into shards do not reach whole weights
        for layer in self._quantized:
            layer.forget()  # the caller may write to the chunks
        for in_fp8 in self._fp8_units:
            in_fp8.mark_changed()  # on all ranks, also on those that the caller gives no chunk to write
        for unit in self._all_units:
            for parameter_slice in unit.parameter_slices if unit.frees_parameters else ():
                if unit.file_shard is not None or (isinstance(unit, Fp8Unit) and not unit.holds_shard):
                    meta = parameter_slice.view_in(unit.weight_shard.to("meta"))
                    yield self._chunk(parameter_slice, meta, unit, ShardWeights(unit, parameter_slice))
                else:
                    yield self._chunk(parameter_slice, parameter_slice.view_in(unit.weight_shard), unit)
        sharded = {s.parameter for u in self._all_units if u.frees_parameters for s in u.slots}
        for parameter, info in named_infos(self.module):
            if parameter not in sharded:
                yield parameter_chunk(parameter, replica_ranks(info, self.pg_collection))

    def hold_weight_shards(self) -> None:
        """Gives this rank's shards of weights that exist only in fp8 memory in the model's type, until the weights are
        used. Call it before `weight_chunks` to write to the chunks' tensors. Raises UserError if they are in a file."""
        if self._weight_file is not None:
            raise UserError(f"{FLAG}: this reads or writes weights in memory; leave it out")
        for unit in self._fp8_units:
            unit.hold_shard()

    def _chunk(
        self, parameter_slice: ParameterSlice, tensor: Tensor, unit: Unit, encoded: EncodedTensor | None = None
    ) -> Chunk:
        info = parameter_slice.info
        holders = replica_ranks(info, self.pg_collection, unit.sharding)
        return Chunk(info.name, info.global_shape, info.box, parameter_slice.flat_range, tensor, holders, encoded)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Copies the weights of the first data parallel rank to all others. Needed only by models that initialise their
        own weights: ours start equal on every rank. Raises UserError with sharded parameters."""
        for unit in self.units:
            group = self._group(unit.sharding.data_group)
            if group is not None:
                if unit.frees_parameters:
                    raise UserError(
                        "broadcast_params: parameters are sharded, or exist only in fp8; make ranks equal before they "
                        "are wrapped"
                    )
                broadcast(unit.param_buffer, group)
        for layer in self._quantized:
            layer.forget_weights()

    def start_param_sync(self, *unused: object, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Starts the all-gathers of updated weights, in the order in which forward needs them.

        With `ddp_config.overlap_param_gather` each module waits for its weights before its forward; otherwise, or with
        `force_sync`, this function waits. Sharded parameters are gathered by their modules instead.
        """
        for layer in self._quantized:
            layer.forget_weights()
        self._quantize_weights()
        for unit in self.units:
            if not unit.shards_weights:
                unit.start_all_gather()
        if force_sync or not (self.ddp_config.overlap_param_gather and self._hooks.are_enabled):
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Waits for all running all-gathers of weights, and until other ranks have copied this rank's (on CUDA, later
        kernels wait). What follows may write the shards."""
        for unit in self._all_units:
            unit.finish_all_gather()
            unit.wait_for_readers()

    def enable_forward_pre_hook(self) -> None:
        """Lets modules wait for weights that are being gathered. This is the initial state."""
        self._hooks.enable()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """From now on, `start_param_sync` waits for its all-gathers, so parameters can be read at any time. Sharded
        parameters can still be read only while their modules run."""
        if param_sync:
            self.finish_param_sync()
        if not any(unit.shards_weights for unit in self._all_units):
            self._hooks.disable()


def share_shards(units: Iterable[Unit]) -> None:
    """Moves the shards of sharded weights into memory that the ranks share, where GPUs of one host shard them. The
    ranks wait for each other."""
    groups: dict[Group, list[Unit]] = {}
    for unit in units:
        if unit.shards_weights and unit.file_shard is None:
            groups.setdefault(unit.shard_group, []).append(unit)
    for group, members in groups.items():
        shared = place_rows(group, [unit.weight_shard for unit in members])
        if shared is not None:
            for unit, (start, shard) in zip(members, shared[1], strict=True):
                unit.share_shard(shared[0], start, shard)


def _kind(tensor: Tensor) -> tuple[torch.device, torch.dtype]:
    return tensor.device, tensor.dtype


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
