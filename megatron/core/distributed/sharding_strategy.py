"""Sharding strategies of data parallelism (Rajbhandari et al., "ZeRO", SC20): numbers only, no communication.

A rank's shard of a unit is a flat range of it, the same range for weights, gradients and optimizer state. In a hybrid
strategy the ranks form several instances: the neighbouring ranks of an instance shard each unit, and the instances are
replicas of each other.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.parameters import ParameterInfo

GRIDS = ("dense", "expert")
_DATA_GROUP = {"dense": "dp_cp", "expert": "expt_dp"}
_INSTANCE_GROUP = {"dense": "intra_dp_cp", "expert": "intra_expt_dp"}
_REPLICA_GROUP = {"dense": "inter_dist_opt", "expert": "inter_expt_dp"}


class ShardingStrategy(enum.Enum):
    """The things that are sharded over data parallel ranks. Each member shards one thing more than the member before
    it."""

    REPLICATED = "no_shard"
    OPTIMIZER = "optim"
    """ZeRO-1: each rank reduces its shard of the gradients, updates its shard of the weights, and gathers the
    others."""
    GRADIENTS = "optim_grads"
    """ZeRO-2: the whole gradients of a unit have memory only from their first contribution to their reduction."""
    PARAMETERS = "optim_grads_params"
    """ZeRO-3: the whole weights of a unit have memory only around their use in forward and backward."""

    @property
    def shards_state(self) -> bool:
        """Whether optimizer state is sharded."""
        return self is not ShardingStrategy.REPLICATED

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are sharded too."""
        return self in (ShardingStrategy.GRADIENTS, ShardingStrategy.PARAMETERS)

    @property
    def shards_weights(self) -> bool:
        """Whether parameters are sharded too."""
        return self is ShardingStrategy.PARAMETERS


@dataclass(frozen=True)
class Sharding:
    """The sharding of the units of one grid over data parallel ranks."""

    strategy: ShardingStrategy = ShardingStrategy.REPLICATED
    shards: int = 1
    """Number of ranks that shard a unit; 1 if units are replicated."""
    shard_index: int = 0
    """Index of this rank's shard."""
    instances: int = 1
    """Number of replicas of each shard."""
    data_group: str = "dp_cp"
    """Name of the group of all ranks whose gradients are summed."""
    shard_group: str = "dp_cp"
    """Name of the group of ranks that shard a unit."""
    replica_group: str = "inter_dist_opt"
    """Name of the group of ranks with the same shard, if there are several instances."""

    def shard_range(self, numel: int) -> tuple[int, int]:
        """Returns this rank's elements [start, stop) of a unit of `numel` elements."""
        assert numel % self.shards == 0, (numel, self)
        size = numel // self.shards
        return self.shard_index * size, (self.shard_index + 1) * size


def sharded_weights(of_grids: Mapping[str, Sharding]) -> dict[str, int]:
    """Returns the number of shards of each grid whose weights are sharded."""
    return {grid: sharding.shards for grid, sharding in of_grids.items() if sharding.strategy.shards_weights}


def data_parallel_group(grid: str) -> str:
    """Returns the name of the group over which gradients of a grid are summed."""
    return _DATA_GROUP[grid]


def sharding_strategy_of(config: DistributedDataParallelConfig) -> ShardingStrategy:
    """Returns the strategy that a config asks for."""
    if config.use_megatron_fsdp or config.use_custom_fsdp:
        return ShardingStrategy(config.data_parallel_sharding_strategy)
    return ShardingStrategy.OPTIMIZER if config.use_distributed_optimizer else ShardingStrategy.REPLICATED


def shardings(config: DistributedDataParallelConfig, groups: ProcessGroupCollection) -> dict[str, Sharding]:
    """Returns the sharding of each grid, without communication. Raises UserError if the process groups have another
    number of instances than the config."""
    return {grid: _sharding(config, groups, grid) for grid in GRIDS}


def _sharding(config: DistributedDataParallelConfig, groups: ProcessGroupCollection, grid: str) -> Sharding:
    strategy, data_group = sharding_strategy_of(config), _DATA_GROUP[grid]
    instances = config.num_distributed_optimizer_instances
    if not strategy.shards_state:
        if instances > 1:
            raise UserError(
                f"num_distributed_optimizer_instances {instances}: nothing is sharded; add use_distributed_optimizer, "
                "or leave it at 1"
            )
        return Sharding(data_group=data_group)
    if grid == "expert" and groups.grid is None:
        return Sharding(data_group=data_group)  # groups filled by hand, for a model that may have no experts
    shard_group = _INSTANCE_GROUP[grid] if instances > 1 else data_group
    ranks, shards = groups.size(data_group), groups.size(shard_group)
    if shards * instances != ranks:
        raise UserError(
            f"num_distributed_optimizer_instances {instances}, but the process groups cut {ranks} data parallel ranks "
            f"into instances of {shards}: make them with optimizer_instances={instances}, a divisor of {ranks}"
        )
    if shards == 1 and instances == 1:
        return Sharding(data_group=data_group)
    return Sharding(
        strategy if shards > 1 else ShardingStrategy.REPLICATED,
        shards,
        groups.rank(shard_group),
        instances if shards > 1 else 1,
        data_group,
        shard_group,
        _REPLICA_GROUP[grid],
    )


# ---------------------------------------------------------------------------------------------------------------------
# Copies of a parameter

_GRID_AXES = {"dense": ("tp", "cp", "dp"), "expert": ("etp", "ep", "edp")}
_DATA_AXES = ("cp", "dp", "edp")
_GROUP_OF_AXIS = {"tp": "tp", "etp": "expt_tp", "ep": "ep"}


def replica_axes(info: ParameterInfo) -> list[str]:
    """Returns the axes of the parameter's grid along which all ranks hold the same box."""
    return [axis for axis in _GRID_AXES[info.grid] if axis not in info.sharded_axes]


def replica_ranks(
    info: ParameterInfo, groups: ProcessGroupCollection, sharding: Sharding | None = None
) -> tuple[int, ...]:
    """Returns the global ranks, ascending, that hold the same box as this rank, without communication.

    These are ranks of this pipeline stage and, for a tied parameter, of the other stages that hold it. With a
    `sharding`, the ranks that have the same shard of it.
    """
    data: str | None = data_parallel_group(info.grid)
    if sharding is not None and sharding.shards > 1:
        data = sharding.replica_group if sharding.instances > 1 else None
    if groups.grid is None:
        return tuple(sorted(groups.ranks(data))) if data else (groups.global_rank,)
    model_axes = [axis for axis in replica_axes(info) if axis not in _DATA_AXES]
    peers = set(groups.grid.group(groups.global_rank, model_axes))
    if info.tied:
        peers = {other for peer in peers for other in groups.ranks(info.tied_over, of=peer)}
    return tuple(sorted({rank for peer in peers for rank in (groups.ranks(data, of=peer) if data else (peer,))}))


def is_counted_on_this_rank(info: ParameterInfo, groups: ProcessGroupCollection) -> bool:
    """Whether norms and counts include this rank's copy of a parameter: true on exactly one of the model parallel ranks
    that hold a copy.

    All data parallel copies count, because sums over gradients stay inside one replica of the model.
    """
    if info.tied and groups.rank(info.tied_over) != 0:
        return False
    model_axes = (axis for axis in replica_axes(info) if axis not in _DATA_AXES)
    return all(groups.rank(_GROUP_OF_AXIS[axis]) == 0 for axis in model_axes)
