"""Functions that make torch process groups, including Megatron-LM's functions for scripts that build their own
groups."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.groups.rank_grid import Axes, hierarchical_groups
from megatron.core.utils.activity import activity
from megatron.core.utils.communicator_settings import CommunicatorSettings
from megatron.core.utils.torch_private import local_group_named, set_group_timeout


@contextlib.contextmanager
def _noted_wait(ranks: Iterable[int] | None) -> Iterator[None]:
    """Notes that this thread waits for the other members of a new group (None: all ranks), if it is one of them.
    gloo connects all members as it makes a group, and NCCL too in a world that is bound to a device."""
    members = tuple(range(dist.get_world_size()) if ranks is None else sorted(ranks))
    if dist.get_rank() not in members:
        yield
        return
    with activity.waiting(activity.begin("new_group", f"new_group {' '.join(map(str, members))}", lambda: members)):
        yield


def create_group(
    ranks: list[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> ProcessGroup:
    """Makes a group by torch.distributed.new_group. Every rank of the world must call this; with
    `use_local_synchronization` only the members."""
    with _noted_wait(ranks):
        return dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=pg_options,
            use_local_synchronization=use_local_synchronization,
            group_desc=group_desc,
        )


_times_made: WeakKeyDictionary[ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""For each world of this process, the number of groups that each set of ranks has made."""


def create_group_among_members(
    ranks: Sequence[int], timeout: timedelta | None = None, pg_options: Any = None
) -> ProcessGroup:
    """Makes a torch group of some ranks. Only these ranks must call this. `pg_options`: those of ProcessGroupNCCL.

    torch names a group by its ranks and by the number of groups that the process has. That number can differ between
    members, which would then wait for each other forever. So this function names the group by its ranks and by the
    number of groups that the same ranks made before.
    """
    world = dist.group.WORLD
    assert world is not None
    counts = _times_made.setdefault(world, Counter())
    counts[tuple(ranks)] += 1
    text = f"members {' '.join(map(str, ranks))} time {counts[tuple(ranks)]}"
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    device = world.bound_device_id
    # torch splits a new group off a world that is bound to a device, and all ranks of the world would have to join.
    world.bound_device_id = None
    try:
        with local_group_named(name), _noted_wait(ranks):
            return dist.new_group(list(ranks), timeout=timeout, pg_options=pg_options, use_local_synchronization=True)
    finally:
        world.bound_device_id = device


def create_hierarchical_groups(
    rank: int,
    ranks: Sequence[int],
    hierarchical_group_sizes: Sequence[int],
    create_gloo_process_groups: bool = False,
    pg_options: Sequence[object] | None = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[ProcessGroup], list[ProcessGroup]]:
    """Returns this rank's group at each level of a hierarchy over `ranks`, innermost first, and the gloo groups of the
    same ranks if asked for. All ranks of the world must call this."""
    plain, gloo = [], []
    for level, groups in enumerate(hierarchical_groups(list(ranks), hierarchical_group_sizes)):
        for members in groups:
            options = pg_options[level] if pg_options is not None else None
            group = create_group(list(members), timeout, None, options, group_desc=group_desc)
            twin = create_group(list(members), timeout, "gloo") if create_gloo_process_groups else None
            if rank in members:
                plain.append(group)
                gloo.extend([twin] if twin is not None else [])
    return plain, gloo


def create_hybrid_dp_cp_groups(rank: int, ranks: Sequence[int], pg_options: object = None) -> dict[int, ProcessGroup]:
    """Returns this rank's group of neighbours for each power of two below the number of ranks, by size. All ranks of
    the world must call this."""
    made = {}
    size = 2
    while size < len(ranks):
        for first in range(0, len(ranks), size):
            members = list(ranks[first : first + size])
            group = create_group(members, pg_options=pg_options)
            if rank in members:
                made[size] = group
        size *= 2
    return made


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Returns the groups along the masked axes of a grid of these sizes, fastest axis first.

    If the world is larger than the grid, the grid repeats.
    """
    axes = Axes(tuple(map(str, range(len(parallel_size)))), tuple(parallel_size))
    along = [name for name, masked in zip(axes.names, mask, strict=True) if masked]
    groups = axes.groups(along)
    period = len(groups) * len(groups[0])
    return [[rank + start for rank in group] for start in range(0, world_size, period) for group in groups]


def get_nccl_options(pg_name: str, nccl_comm_cfgs: CommunicatorSettings) -> object:
    """Returns the NCCL options of a group from a table by group name; None if the table does not have the group."""
    if pg_name not in nccl_comm_cfgs:
        return None
    settings = dict(nccl_comm_cfgs[pg_name])
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=settings.pop("is_high_priority_stream", False))
    for name, value in settings.items():
        setattr(options.config, name, value)
    return options


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: dict[str, dict[str, Any]], pg_name: str, key_value_pair: tuple[str, object]
) -> None:
    """Sets one entry of a table of NCCL options."""
    key, value = key_value_pair
    nccl_comm_cfgs.setdefault(pg_name, {})[key] = value


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Sets how long collectives of a group (default: the world) may take."""
    set_group_timeout(timeout, pg)
