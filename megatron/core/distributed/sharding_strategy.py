"""What of a unit is spread over data parallel ranks (Rajbhandari et al., "ZeRO", SC20), as numbers.

A rank's share of a unit is a flat range of it, the same range of weights, gradients and optimizer state. In a hybrid
strategy the ranks form several instances: a unit is shared out among the neighbours of one, and the instances are
replicas of each other.
"""

import enum
from dataclasses import dataclass

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.process_groups_config import ProcessGroupCollection

GRIDS = ("dense", "expert")
_DATA_GROUP = {"dense": "dp_cp", "expert": "expt_dp"}
_INSTANCE_GROUP = {"dense": "intra_dp_cp", "expert": "intra_expt_dp"}
_REPLICA_GROUP = {"dense": "inter_dist_opt", "expert": "inter_expt_dp"}


class ShardingStrategy(enum.Enum):
    """Each member shards what the ones before it shard, and one thing more."""

    REPLICATED = "no_shard"
    OPTIMIZER = "optim"
    """ZeRO 1: each rank gets the sum of its range of the gradients, updates it, and gathers the others' weights."""
    GRADIENTS = "optim_grads"
    """ZeRO 2: whole gradients of a unit live only from a micro-batch's first one to their reduction."""
    PARAMETERS = "optim_grads_params"
    """ZeRO 3: whole weights of a unit live only around their use, in forward and in backward."""

    @property
    def shards_state(self) -> bool:
        return self is not ShardingStrategy.REPLICATED

    @property
    def shards_gradients(self) -> bool:
        return self in (ShardingStrategy.GRADIENTS, ShardingStrategy.PARAMETERS)

    @property
    def shards_weights(self) -> bool:
        return self is ShardingStrategy.PARAMETERS


@dataclass(frozen=True)
class Sharding:
    """How units of one grid lie over data parallel ranks."""

    strategy: ShardingStrategy = ShardingStrategy.REPLICATED
    shards: int = 1
    """Ranks that share a unit out among themselves; 1 where it is replicated."""
    place: int = 0
    """Which of the shards is this rank's."""
    instances: int = 1
    """Replicas of the shards."""
    data_group: str = "dp_cp"
    """Name of the group of all ranks whose gradients are summed."""
    shard_group: str = "dp_cp"
    """Name of the group of the ranks that share a unit."""
    replica_group: str = "inter_dist_opt"
    """Name of the group of the ranks that own the same range, where there are several instances."""

    def owned_range(self, numel: int) -> tuple[int, int]:
        """This rank's elements [start, stop) of a unit of so many."""
        assert numel % self.shards == 0, (numel, self)
        size = numel // self.shards
        return self.place * size, (self.place + 1) * size


def data_parallel_group(grid: str) -> str:
    """Name of the group over which gradients of a grid are summed."""
    return _DATA_GROUP[grid]


def sharding_strategy_of(config: DistributedDataParallelConfig) -> ShardingStrategy:
    """The strategy that a config asks for."""
    if config.use_megatron_fsdp or config.use_custom_fsdp:
        return ShardingStrategy(config.data_parallel_sharding_strategy)
    return ShardingStrategy.OPTIMIZER if config.use_distributed_optimizer else ShardingStrategy.REPLICATED


def shardings(config: DistributedDataParallelConfig, groups: ProcessGroupCollection) -> dict[str, Sharding]:
    """The sharding of each grid. Asks nobody. Raises UserError where the groups were made for other instances."""
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
        return Sharding(data_group=data_group)  # filled by hand, for a model that may have no experts
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
