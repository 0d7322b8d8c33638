"""Layers, parameters and bytes of each rank of a run, from building its part of the model on the meta device.

The model provider of the run builds a rank's chunks, in the process groups that the rank would be in, and the run's own
functions plan and shard their units; there is no second formula. Ranks that differ only in their data parallel
coordinates (context parallel ranks included) hold the same part of the model: it is built once for all of them.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.adapters.nf4 import nf4_bytes
from megatron.core.distributed import weight_file
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.reduce_scatter_gradients import small_bytes
from megatron.core.distributed.sharding_strategy import Sharding, sharded_weights, shardings
from megatron.core.distributed.units import UnitPlan, named_infos, plan_frozen_units, plan_units
from megatron.core.exceptions import UserError
from megatron.core.ops.fp8.microscaling import MX_BLOCK
from megatron.core.ops.fp8.nvfp4 import NV_BLOCK
from megatron.core.optimizer.host_state import choose_offloaded
from megatron.core.optimizer.nvme_state import buffer_bytes, piece_bytes
from megatron.core.optimizer.state_storage import planned_states, rounds_to_model_weights, state_bytes
from megatron.core.optimizer.update_rules import build_update_rule
from megatron.core.parameters import Box, ParameterInfo, info_of
from megatron.core.pipeline_parallel.stage_map import StageModules, stage_map
from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.core.utils.scratch_file import BLOCK, padded
from megatron.data.tokenizer.base import Tokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import Environment, default_groups, groups_of_rank
from megatron.training.providers import Context, Providers, stages_of_rank
from megatron.training.state import TrainState

_DATA_AXES = ("dp", "cp", "edp")
"""Along these, ranks hold the same part of the model."""


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes on a rank, without activations."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    """Largest amount at any time of a step for whole weights and gradients of units that are otherwise sharded."""
    quantized: int = 0
    """Quantised copies of weights that fp8 layers keep until the weights change."""
    host: int = 0
    """Optimizer state in host memory, or its buffers if the state is in a file, and buffers of weights in a file."""
    file: int = 0
    """Optimizer state and weights in files of a local disk."""
    weights_file: int = 0
    """The part of `file` for weights."""
    passing: int = 0
    """The part of `weights` and `host` through which the content of files passes."""
    saved: int = 0
    """This rank's share of a checkpoint, which ranks that hold the same tensor write together."""

    @property
    def total(self) -> int:
        """Sum of all kinds in the memory of the device."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.quantized

    @property
    def local_copy(self) -> int:
        """Bytes of a local copy of the rank's state (--non-persistent-ckpt-type local)."""
        return self.weights + self.optimizer + self.host + self.file - self.passing


@dataclass(frozen=True)
class ModelShard:
    """The part of the model that a rank builds: its chunks, and the units of each."""

    stages: tuple[StageModules, ...]
    plans: tuple[tuple[UnitPlan, ...], ...]
    """Units of the parameters that are trained."""
    frozen_plans: tuple[tuple[UnitPlan, ...], ...]
    """Units of the frozen weights that data parallel ranks shard."""
    shardings: Mapping[str, Sharding]
    frozen: tuple[nn.Parameter, ...] = ()
    """Parameters that are not trained and belong to no unit: every data parallel rank holds them whole."""

    @property
    def infos(self) -> list[ParameterInfo]:
        """Descriptors of its parameters."""
        plans = [plan for plans in (*self.frozen_plans, *self.plans) for plan in plans]
        return [slot.info for plan in plans for slot in plan.slots] + [info_of(parameter) for parameter in self.frozen]

    @property
    def parameters(self) -> int:
        """Elements of its parameters, without padding."""
        return sum(info.box.numel for info in self.infos)


@dataclass(frozen=True)
class RankMemory:
    """The model shard and the memory of one rank."""

    rank: int
    place: Mapping[str, int]
    """Its coordinates along every axis."""
    shard: ModelShard
    memory: MemoryBytes


def rank_memory(
    config: PretrainConfig, providers: Providers, tokenizer: Tokenizer, padded_vocab: int
) -> list[RankMemory]:
    """Returns the memory of every rank, in the order of ranks. Raises UserError if a part of the model cannot be
    built."""
    built: dict[tuple[tuple[str, int], ...], tuple[ModelShard, MemoryBytes]] = {}
    found = []
    for rank in range(config.world_size):
        place = config.grid.coordinates(rank)
        key = tuple(item for item in place.items() if item[0] not in _DATA_AXES)
        if key not in built:
            shard = build_shard(config, providers, tokenizer, padded_vocab, rank)
            built[key] = shard, memory_of_shard(shard, config)
        found.append(RankMemory(rank, place, *built[key]))
    check_complete(entry.shard for entry in found)
    return found


@dataclass(frozen=True)
class BuiltChunks:
    """The model chunks of a rank on the meta device, and the parts of the run with which they were built."""

    chunks: tuple[nn.Module, ...]
    context: Context

    @contextlib.contextmanager
    def as_current(self, providers: Providers, padded_vocab: int) -> Iterator[None]:
        """Makes the run that of the functions that Megatron-LM's providers read, as if this process were the rank."""
        groups, pipeline = self.context.environment.groups, pipeline_of(self.context.config.transformer)
        with (
            providers.publication.run_for_now(self.context, padded_vocab_size=padded_vocab),
            default_groups(groups, pipeline, providers.publication),
        ):
            yield


def build_chunks(
    config: PretrainConfig, providers: Providers, tokenizer: Tokenizer, padded_vocab: int, rank: int
) -> BuiltChunks:
    """Builds a rank's chunks on the meta device. Communicates with no other rank, and leaves a current run as it is."""
    groups = groups_of_rank(config, rank, planned=True)
    pipeline = pipeline_of(config.transformer)
    environment = Environment(rank, config.world_size, torch.device("meta"), groups, pipeline.loss_rank)
    built = BuiltChunks((), Context(config, environment, tokenizer, TrainState()))
    with built.as_current(providers, padded_vocab), torch.device("meta"):
        stages = stages_of_rank(config, groups.rank("pp"))
        return dataclasses.replace(built, chunks=tuple(providers.build_model(built.context, stage) for stage in stages))


def build_shard(
    config: PretrainConfig, providers: Providers, tokenizer: Tokenizer, padded_vocab: int, rank: int
) -> ModelShard:
    """Builds a rank's chunks as `build_chunks` does and plans their units."""
    return shard_of(build_chunks(config, providers, tokenizer, padded_vocab, rank), config)


def shard_of(built: BuiltChunks, config: PretrainConfig) -> ModelShard:
    """Plans the units of built chunks."""
    groups = built.context.environment.groups
    shared = shardings(config.ddp, groups)
    shards = {grid: sharding.shards for grid, sharding in shared.items()}
    stages, pipeline_rank = stage_map(config.transformer), groups.rank("pp")
    frozen_plans = tuple(tuple(plan_frozen_units(chunk, sharded_weights(shared))) for chunk in built.chunks)
    sharded = {slot.parameter for plans in frozen_plans for plan in plans for slot in plan.slots}
    untrained = (p for chunk in built.chunks for p, _ in named_infos(chunk) if not p.requires_grad)
    return ModelShard(
        tuple(stages.stage_at(pipeline_rank, number) for number in range(stages.chunks)),
        tuple(tuple(plan_units(chunk, shards, config.ddp.main_grads_dtype)) for chunk in built.chunks),
        frozen_plans,
        shared,
        tuple(parameter for parameter in untrained if parameter not in sharded),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


def memory_of_shard(shard: ModelShard, config: PretrainConfig) -> MemoryBytes:
    """Returns the bytes of the flat buffers of a shard's units, and of the places of their optimizer state."""
    weights, gradients, optimizer, quantized = sum(map(_bytes_of_frozen, shard.frozen)), 0, 0, 0
    has_adapters = config.adapters.lora_rank is not None  # then checkpoints lack the frozen weights
    host, pieces, saved = 0, [], 0.0 if has_adapters else float(weights)
    copies = {"dense": config.grid.data * config.grid.context, "expert": config.grid.axis_size("edp")}
    in_files: list[list[int]] = [[] for _ in shard.plans]
    for number, frozen in enumerate(shard.frozen_plans):
        sizes = [_weight_bytes(plan) // shard.shardings[plan.grid].shards for plan in frozen]
        saved += 0 if has_adapters else sum(_weight_bytes(plan) / copies[plan.grid] for plan in frozen)
        if config.ddp.param_nvme_offload_path is not None:
            in_files[number] += sizes
        else:
            weights += sum(sizes)
    chunk_of = {id(plan): number for number, plans in enumerate(shard.plans) for plan in plans}
    moments = build_update_rule(config.optimizer).moments
    plans = [plan for plans in shard.plans for plan in plans]
    fraction = config.optimizer.optimizer_offload_fraction if config.optimizer.optimizer_cpu_offload else 0.0
    for plan, is_offloaded in zip(plans, choose_offloaded([plan.numel for plan in plans], fraction), strict=True):
        sharding = shard.shardings[plan.grid]
        owned, strategy = plan.numel // sharding.shards, sharding.strategy
        whole = owned if strategy.shards_weights else plan.numel
        gathers_in_fp8 = config.ddp.fp8_param_gather and plan.gathers_in_fp8
        if strategy.shards_weights and config.ddp.param_nvme_offload_path is not None:
            in_files[chunk_of[id(plan)]].append(plan.dtype.itemsize * whole)
        else:
            weights += whole if gathers_in_fp8 else plan.dtype.itemsize * whole
        if gathers_in_fp8 and not rounds_to_model_weights(plan, config.optimizer, is_offloaded):
            weights += plan.dtype.itemsize * owned
        if plan.in_fp8 and config.transformer.fp8_weight_cache and not strategy.shards_weights:
            quantized += plan.numel * (1 if gathers_in_fp8 else 2) + _bytes_of_small_blocks(plan.numel, config)
        itemsize = plan.grad_dtype.itemsize + (torch.int64.itemsize if config.ddp.exact_gradient_sums else 0)
        gradients += itemsize * (owned if strategy.shards_gradients else plan.numel)
        ends = {0, sharding.shards - 1}  # with Muon, the first shards have other moments than the last
        ranges = [(index * owned, (index + 1) * owned) for index in ends]
        nbytes = max(state_bytes(plan, own, moments, config.optimizer) for own in ranges)
        states = 0 if config.checkpoint.no_save_optim else nbytes * sharding.shards
        saved += (plan.dtype.itemsize * plan.numel + states) / copies[plan.grid]
        if not is_offloaded:
            optimizer += nbytes
        elif config.optimizer.optimizer_nvme_offload_path is None:
            host += nbytes
        else:
            pieces += piece_bytes(planned_states(plan, ranges[0], moments, config.optimizer), owned)
    gathered, state_file = _gathered_bytes(shard, config), sum(pieces) + BLOCK * bool(pieces)
    weights_file = sum(sum(map(padded, sizes)) + BLOCK for sizes in in_files if sizes)
    resident = sum(map(weight_file.device_bytes, in_files))
    buffers = buffer_bytes(pieces) + sum(map(weight_file.buffer_bytes, in_files))
    return MemoryBytes(
        weights + resident,
        gradients,
        optimizer,
        gathered,
        quantized,
        host + buffers,
        state_file + weights_file,
        weights_file,
        resident + buffers,
        int(saved),
    )


def _bytes_of_small_blocks(numel: int, config: PretrainConfig) -> int:
    """Returns the bytes of the scales of a weight and its transpose, where a block is so small that they count."""
    if config.transformer.fp4 is not None:
        return 2 * torch.float32.itemsize * numel // NV_BLOCK
    return 2 * numel // MX_BLOCK if config.transformer.fp8_recipe == "mxfp8" else 0


def _bytes_of_frozen(parameter: nn.Parameter) -> int:
    return nf4_bytes(parameter.numel()) if info_of(parameter).in_nf4 else parameter.nbytes


def _weight_bytes(plan: UnitPlan) -> int:
    """Returns the bytes of the whole weights of a unit."""
    return nf4_bytes(plan.numel) if plan.in_nf4 else plan.numel * plan.dtype.itemsize


def _gathered_bytes(shard: ModelShard, config: PretrainConfig) -> int:
    """Returns the largest number of bytes of sharded weights and gradients that are whole at one time."""
    late = config.transformer.pipeline_schedule in ("zb-h1", "zb-v")
    return _gathered_weights(shard, config.ddp) + (
        sum(sum(_opened(shard, chunk)) for chunk in range(len(shard.plans)))  # all, from first to last product
        if late
        else _gathered_gradients(shard, config.ddp.overlap_grad_reduce)
    )


def _gathered_weights(shard: ModelShard, config: DistributedDataParallelConfig) -> int:
    """Returns the largest number of bytes of gathered weights. One unit is gathered at a time (a layer stays while its
    experts are); with overlap the next unit too. The last unit stays after forward, for the backward that often
    follows, until the chunk is used again."""

    def bytes_of(plan: UnitPlan) -> int:
        nbytes = plan.numel if config.fp8_param_gather and plan.gathers_in_fp8 else _weight_bytes(plan)
        return nbytes * shard.shardings[plan.grid].strategy.shards_weights

    plans_of_chunks = [frozen + plans for frozen, plans in zip(shard.frozen_plans, shard.plans, strict=True)]
    chunks = [_read_together(plans, bytes_of) for plans in plans_of_chunks]
    most = 0
    for chunk, sizes in enumerate(chunks):
        is_tied = _head_is_tied(shard.stages[chunk], plans_of_chunks[chunk])
        again = sizes[:1] if is_tied else []  # the head uses the embedding's
        others = sum(sum(other[-1:]) for other in chunks) - sum(sizes[-1:])
        around = _around(plans_of_chunks[chunk], sizes)
        most = max(most, _largest_run(sizes + again, 2 if config.overlap_param_gather else 1, around) + others)
    return most


def _gathered_gradients(shard: ModelShard, overlap: bool) -> int:
    """Returns the largest number of bytes of whole gradients. One unit is computed at a time; with overlap the
    reductions of units before it are still running, and that of the last unit of every other chunk. The gradient of an
    embedding that the head shares stays until backward reaches it."""
    opened = [_opened(shard, chunk) for chunk in range(len(shard.plans))]
    most = 0
    for chunk, sizes in enumerate(opened):
        tied = int(_head_is_tied(shard.stages[chunk], shard.plans[chunk]))
        others = sum(sum(other[:1]) for other in opened) - sum(sizes[:1]) if overlap else 0
        around = _around(shard.plans[chunk], sizes)[tied:]
        most = max(most, sum(sizes[:tied]) + _most_while_reducing(sizes[tied:], around, overlap) + others)
    return most


def _most_while_reducing(sizes: Sequence[int], around: Sequence[int], overlap: bool) -> int:
    """Returns the largest sum of a unit, of those around it, and with overlap of the units that are still being
    reduced: the one behind it, and small ones between."""
    most, reducing = 0, 0
    for size, outer in zip(reversed(sizes), reversed(around), strict=True):
        most = max(most, size + outer + reducing)
        if overlap:
            reducing = size + (0 if size > small_bytes(sizes) else reducing)
    return most


def _opened(shard: ModelShard, chunk: int) -> list[int]:
    """Returns the bytes of the whole gradients of each unit of a chunk, 0 for units that keep them anyway."""
    return _read_together(
        shard.plans[chunk],
        lambda plan: plan.numel * plan.grad_dtype.itemsize * shard.shardings[plan.grid].strategy.shards_gradients,
    )


def _read_together(plans: Sequence[UnitPlan], bytes_of: Callable[[UnitPlan], int]) -> list[int]:
    """Returns the bytes of units. Those that differ only in fp8 have the same module and are one entry."""
    sizes: dict[tuple[str, str, torch.dtype], int] = {}
    for plan in plans:
        key = plan.name, plan.grid, plan.dtype
        sizes[key] = sizes.get(key, 0) + bytes_of(plan)
    return list(sizes.values())


def _head_is_tied(stage: StageModules, plans: Sequence[UnitPlan]) -> bool:
    """Whether the head of a chunk uses the weight of the embedding, which is the first of these units of the chunk."""
    has_embedding = bool(plans) and any(slot.info.embedding_or_output for slot in plans[0].slots)
    is_both = (stage.embedding or stage.prediction_layers > 0) and stage.loss
    return is_both and has_embedding and "output_layer" not in [plan.name for plan in plans]


def _around(plans: Sequence[UnitPlan], sizes: Sequence[int]) -> list[int]:
    """Returns for each entry of `_read_together` the bytes of those that contain it: of the layer for a unit of its
    experts."""
    names = [name for name, _, _ in dict.fromkeys((plan.name, plan.grid, plan.dtype) for plan in plans)]
    return [sum(sizes[other] for other in range(place) if names[other] == name) for place, name in enumerate(names)]


def _largest_run(sizes: Sequence[int], length: int, around: Sequence[int]) -> int:
    """Returns the largest sum of `length` neighbouring sizes, with the unit around the first."""
    return max(
        (
            sum(sizes[first : first + length]) + (around[first] if first < len(around) else 0)
            for first in range(len(sizes))
        ),
        default=0,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The whole


def parameters_of_model(shards: Iterable[ModelShard]) -> int:
    """Returns the number of elements of the whole model without vocabulary padding; each tensor counts once."""
    shapes = {info.name: info.global_shape for shard in shards for info in shard.infos}
    return sum(math.prod(shape) for shape in shapes.values())


def check_complete(shards: Iterable[ModelShard]) -> None:
    """Raises UserError unless some rank holds every element of every tensor, which a user's own model may violate."""
    boxes: dict[str, tuple[tuple[int, ...], set[Box]]] = {}
    for shard in {id(shard): shard for shard in shards}.values():
        for info in shard.infos:
            boxes.setdefault(info.name, (info.global_shape, set()))[1].add(info.box)
    for name, (shape, held) in boxes.items():
        count = sum(box.numel for box in held)
        if count != math.prod(shape):
            raise UserError(
                f"the ranks hold {count:,} elements of {name}, which has {math.prod(shape):,} (shape {list(shape)})"
            )
