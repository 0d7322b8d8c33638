"""The default process groups: makes them and reads them, for Megatron-LM's functions in parallel_state.py.

`initialize_model_parallel` makes a `ProcessGroupCollection` the default of public constructors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import default_collection, has_default_collection, set_default_collection
from megatron.core.groups.process_groups_config import (
    GROUPS_WITH_SETTINGS,
    ProcessGroupCollection,
    first_and_last,
    first_only,
)
from megatron.core.groups.rank_grid import DEFAULT_ORDER, RankGrid, hierarchical_groups
from megatron.core.utils.communicator_settings import read_communicator_settings
from megatron.core.utils.rendezvous import start_torch_distributed
from megatron.core.utils.torch_groups import create_group

Group = ProcessGroup | None


@dataclass
class _Extras:
    """State of Megatron-LM's functions in addition to the default collection."""

    virtual_stages: int | None = None
    virtual_stage: int | None = None
    v_shaped: bool = False
    """Each rank has two chunks, and the second chunks go from the last rank back to the first."""
    overrides: dict[tuple[str, str], int] = field(default_factory=dict)
    """Sizes and ranks that were set by hand, for tests."""
    gloo_groups: dict[str, Group] = field(default_factory=dict)

    def reset(self) -> None:
        """Forgets everything."""
        self.__init__()  # type: ignore[misc]


extras = _Extras()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: Callable[..., list[int]] | None = None,
    get_position_embedding_ranks: Callable[..., list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    create_all_gather_group: bool | None = False,
) -> None:
    """Divides the world into groups and makes them the default.

    Starts torch.distributed from torchrun's environment if needed; without torchrun the world is this process. Torch
    groups are made at their first use. Raises UserError if sizes do not fit the world, if groups exist already, and for
    arguments that are not supported yet.
    """
    _refuse_what_is_to_come(
        pipeline_model_parallel_comm_backend=pipeline_model_parallel_comm_backend not in (None, "nccl"),
        use_sharp=use_sharp,
        hybrid_context_parallel=hybrid_context_parallel,
        high_priority_stream_groups=bool(high_priority_stream_groups),
        sharp_enabled_group=sharp_enabled_group is not None,
        create_all_gather_group=bool(create_all_gather_group),
    )
    if has_default_collection():
        raise UserError("model parallel groups exist already: call destroy_model_parallel() first")
    timeout = timedelta(minutes=distributed_timeout_minutes)
    path = nccl_communicator_config_path
    settings = None if path is None else read_communicator_settings(path, GROUPS_WITH_SETTINGS)
    in_world = start_torch_distributed(timeout=timeout)
    grid = RankGrid(
        dist.get_world_size() if in_world else 1,
        tensor=tensor_model_parallel_size,
        context=context_parallel_size,
        pipeline=pipeline_model_parallel_size,
        expert=expert_model_parallel_size,
        expert_tensor=expert_tensor_parallel_size,
        order=order,
        optimizer_instances=num_distributed_optimizer_instances,
    )
    if hierarchical_context_parallel_sizes is not None:
        # Raises an error here instead of at the first use of the groups.
        hierarchical_groups(range(context_parallel_size), hierarchical_context_parallel_sizes)
    collection = ProcessGroupCollection.from_grid(
        grid,
        dist.get_rank() if in_world else 0,
        hierarchical_context_sizes=hierarchical_context_parallel_sizes,
        embedding_ranks=get_embedding_ranks or first_and_last,
        position_embedding_ranks=get_position_embedding_ranks or first_only,
        timeout=timeout,
        nccl_settings=settings,
    )
    set_default_collection(collection)
    if virtual_pipeline_model_parallel_size is not None:
        extras.virtual_stages, extras.virtual_stage = virtual_pipeline_model_parallel_size, 0


def _refuse_what_is_to_come(**asked: bool) -> None:
    names = [name for name, is_asked in asked.items() if is_asked]
    if names:
        raise UserError(f"initialize_model_parallel: not yet: {', '.join(names)}")


def destroy_model_parallel() -> None:
    """Destroys all groups, so that others can be made."""
    if has_default_collection():
        default_collection().close()
    set_default_collection(None)
    extras.reset()


def is_initialized() -> bool:
    """Whether groups exist."""
    return has_default_collection()


def is_unitialized() -> bool:
    """Whether no groups exist."""
    return not has_default_collection()


def groups() -> ProcessGroupCollection:
    """Returns the default collection. Raises UserError if groups do not exist."""
    if not has_default_collection():
        raise UserError("model parallel groups do not exist: call initialize_model_parallel() first")
    return default_collection()


def group_of(name: str, check_initialized: bool = True) -> Any:
    """Returns the torch group `name`; None before groups exist if `check_initialized` is False."""
    if not check_initialized and not has_default_collection():
        return None
    return getattr(groups(), name)


def size_of(name: str) -> int:
    """Returns the size of a group, or the one that was set by hand."""
    return extras.overrides.get((name, "size")) or groups().size(name)


def rank_of(name: str) -> int:
    """Returns this rank's index in a group, or the one that was set by hand."""
    override = extras.overrides.get((name, "rank"))
    return groups().rank(name) if override is None else override


def _override(name: str, what: str, value: int | None) -> None:
    if value is None:
        extras.overrides.pop((name, what), None)
    else:
        extras.overrides[name, what] = value


# Functions that differ only in the group's name are made by the functions below.


def group_getter(name: str) -> Callable[..., Group]:
    """Returns a getter of a group."""

    def get_group(check_initialized: bool = True) -> Group:
        """Returns the torch group; None for a single process, or before groups exist if `check_initialized` is
        False."""
        return group_of(name, check_initialized)

    return get_group


def size_getter(name: str) -> Callable[[], int]:
    """Returns a getter of a group's size."""
    return lambda: size_of(name)


def rank_getter(name: str) -> Callable[[], int]:
    """Returns a getter of this rank's index in a group."""
    return lambda: rank_of(name)


def first_rank_getter(name: str) -> Callable[[], int]:
    """Returns a getter of the global rank of a group's first member."""
    return lambda: groups().ranks(name)[0]


def size_setter(name: str) -> Callable[[int | None], None]:
    """Returns a setter of a size for tests; None removes the setting."""
    return lambda world_size: _override(name, "size", world_size)


def rank_setter(name: str) -> Callable[[int | None], None]:
    """Returns a setter of an index for tests; None removes the setting."""
    return lambda rank: _override(name, "rank", rank)


def gloo_group_of(name: str) -> Group:
    """Returns a group for host tensors: the group itself, or a gloo group of the same ranks."""
    group = group_of(name)
    if group is None or "gloo" in dist.get_backend_config(group):
        return group
    if name not in extras.gloo_groups:
        ranks = list(groups().ranks(name))
        extras.gloo_groups[name] = create_group(ranks, backend="gloo", use_local_synchronization=True)
    return extras.gloo_groups[name]
