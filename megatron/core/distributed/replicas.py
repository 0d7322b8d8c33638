"""Which ranks hold the same values of a parameter, from its descriptor and the groups."""

from megatron.core.distributed.sharding_strategy import Sharding, data_parallel_group
from megatron.core.parameters import ParameterInfo
from megatron.core.process_groups_config import ProcessGroupCollection

_AXES = {"dense": ("tp", "cp", "dp"), "expert": ("etp", "ep", "edp")}
_DATA_AXES = ("cp", "dp", "edp")
_GROUP_OF_AXIS = {"tp": "tp", "etp": "expt_tp", "ep": "ep"}


def replica_axes(info: ParameterInfo) -> list[str]:
    """Axes of the parameter's grid along which every rank holds the same box."""
    return [axis for axis in _AXES[info.grid] if axis not in info.sharded_axes]


def replica_ranks(
    info: ParameterInfo, groups: ProcessGroupCollection, sharding: Sharding | None = None
) -> tuple[int, ...]:
    """Global ranks, ascending, that hold the same box as this rank: of this pipeline stage, and of the other one that
    holds a tied parameter. With a `sharding`: those that own the same range of it. Asks nobody."""
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


def counts_here(info: ParameterInfo, groups: ProcessGroupCollection) -> bool:
    """True on exactly one of the model parallel ranks that hold a copy: norms and counts take that one's.

    Data parallel copies all count: sums over gradients stay inside one replica of the model.
    """
    if info.tied and groups.rank(info.tied_over) != 0:
        return False
    model_axes = (axis for axis in replica_axes(info) if axis not in _DATA_AXES)
    return all(groups.rank(_GROUP_OF_AXIS[axis]) == 0 for axis in model_axes)
