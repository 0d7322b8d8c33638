"""Which ranks hold the same values of a parameter, from its descriptor and the groups."""

from megatron.core.parameters import ParameterInfo
from megatron.core.process_groups_config import ProcessGroupCollection

_AXES = {"dense": ("tp", "cp", "dp"), "expert": ("etp", "ep", "edp")}
_DATA_AXES = ("cp", "dp", "edp")
_GROUP_OF_AXIS = {"tp": "tp", "etp": "expt_tp", "ep": "ep"}


def data_parallel_group(info_grid: str) -> str:
    """Name of the group over which gradients of a grid are reduced and weights are copies."""
    return "dp_cp" if info_grid == "dense" else "expt_dp"


def replica_axes(info: ParameterInfo) -> list[str]:
    """Axes of the parameter's grid along which every rank holds the same box."""
    return [axis for axis in _AXES[info.grid] if axis not in info.sharded_axes]


def replica_ranks(info: ParameterInfo, groups: ProcessGroupCollection) -> tuple[int, ...]:
    """Global ranks of this pipeline stage, ascending, that hold the same box as this rank. Asks nobody."""
    if groups.grid is None:
        return tuple(sorted(groups.ranks(data_parallel_group(info.grid))))
    return groups.grid.group(groups.global_rank, replica_axes(info))


def counts_here(info: ParameterInfo, groups: ProcessGroupCollection) -> bool:
    """True on exactly one of the model parallel ranks that hold a copy: norms and counts take that one's.

    Data parallel copies all count: sums over gradients stay inside one model parallel group.
    """
    if info.tied and groups.rank("pp") != 0:
        return False
    model_axes = (axis for axis in replica_axes(info) if axis not in _DATA_AXES)
    return all(groups.rank(_GROUP_OF_AXIS[axis]) == 0 for axis in model_axes)
