"""What of a unit is spread over data parallel ranks (Rajbhandari et al., "ZeRO", SC20)."""

import enum

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.exceptions import UserError


class Placement(enum.Enum):
    """Each member shards what the ones before it shard, and one thing more. A rank's share is a flat range of the unit.

    Only REPLICATED runs so far. What the others change is one method of `Unit` or `Bucket` each: OPTIMIZER narrows
    `Unit.owned_range` and gathers `param_buffer` after the update; GRADIENTS makes the bucket's all-reduce a
    reduce-scatter and gives `grad_buffer` back after it; PARAMETERS lets `param_buffer` come and go around each use.
    """

    REPLICATED = "no_shard"
    OPTIMIZER = "optim"
    GRADIENTS = "optim_grads"
    PARAMETERS = "optim_grads_params"


def placement_of(config: DistributedDataParallelConfig) -> Placement:
    """The placement that a config asks for. Raises UserError for one that is still to come."""
    if config.use_megatron_fsdp or config.use_custom_fsdp:
        wanted = Placement(config.data_parallel_sharding_strategy)
    else:
        wanted = Placement.OPTIMIZER if config.use_distributed_optimizer else Placement.REPLICATED
    if wanted is not Placement.REPLICATED:
        raise UserError(f"not yet: data parallel ranks that share {wanted.value}; every rank keeps a whole copy so far")
    return wanted
