"""Megatron-LM's functions about process groups, for user scripts.

`initialize_model_parallel` makes a `ProcessGroupCollection` the default of public constructors; the getters read it.
Nothing in the library imports this module: inside, groups are arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core import process_groups_config
from megatron.core.exceptions import UserError
from megatron.core.process_groups_config import (
    ProcessGroupCollection,
    first_and_last,
    first_only,
    has_default_collection,
    set_default_collection,
)
from megatron.core.rank_grid import DEFAULT_ORDER, RankGrid, hierarchical_groups
from megatron.core.utils.rendezvous import start_torch_distributed
from megatron.core.utils.torch_groups import create_group
from megatron.core.utils.torch_groups import create_hierarchical_groups as create_hierarchical_groups
from megatron.core.utils.torch_groups import create_hybrid_dp_cp_groups as create_hybrid_dp_cp_groups
from megatron.core.utils.torch_groups import (
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
from megatron.core.utils.torch_groups import get_nccl_options as get_nccl_options
from megatron.core.utils.torch_groups import overwrite_nccl_comm_cfgs as overwrite_nccl_comm_cfgs
from megatron.core.utils.torch_groups import update_pg_timeout as update_pg_timeout

default_embedding_ranks = first_and_last
default_position_embedding_ranks = first_only

Group = ProcessGroup | None


@dataclass
class _Extras:
    """The state of these functions beside the collection."""

    virtual_stages: int | None = None
    virtual_stage: int | None = None
    v_shaped: bool = False
    """Two chunks on each rank, the second of which run from the last rank back to the first."""
    overrides: dict[tuple[str, str], int] = field(default_factory=dict)
    """Sizes and ranks that were set by hand, for tests."""
    gloo_groups: dict[str, Group] = field(default_factory=dict)


_extras = _Extras()


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
        nccl_communicator_config_path=nccl_communicator_config_path is not None,
        high_priority_stream_groups=bool(high_priority_stream_groups),
        sharp_enabled_group=sharp_enabled_group is not None,
        create_all_gather_group=bool(create_all_gather_group),
    )
    if has_default_collection():
        raise UserError("model parallel groups exist already: call destroy_model_parallel() first")
    timeout = timedelta(minutes=distributed_timeout_minutes)
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
    if (
        hierarchical_context_parallel_sizes is not None
    ):  # raises an error here instead of at the first use of the groups
        hierarchical_groups(range(context_parallel_size), hierarchical_context_parallel_sizes)
    collection = ProcessGroupCollection.from_grid(
        grid,
        dist.get_rank() if in_world else 0,
        hierarchical_context_sizes=hierarchical_context_parallel_sizes,
        embedding_ranks=get_embedding_ranks or first_and_last,
        position_embedding_ranks=get_position_embedding_ranks or first_only,
        timeout=timeout,
    )
    set_default_collection(collection)
    if virtual_pipeline_model_parallel_size is not None:
        _extras.virtual_stages, _extras.virtual_stage = virtual_pipeline_model_parallel_size, 0


def _refuse_what_is_to_come(**asked: bool) -> None:
    names = [name for name, is_asked in asked.items() if is_asked]
    if names:
        raise UserError(f"initialize_model_parallel: not yet: {', '.join(names)}")


def destroy_model_parallel() -> None:
    """Destroys all groups, so that others can be made."""
    global _extras
    if has_default_collection():
        process_groups_config.default_collection().close()
    set_default_collection(None)
    _extras = _Extras()


def is_initialized() -> bool:
    """Whether groups exist."""
    return has_default_collection()


model_parallel_is_initialized = is_initialized


def is_unitialized() -> bool:
    """Whether no groups exist."""
    return not has_default_collection()


def _groups() -> ProcessGroupCollection:
    if not has_default_collection():
        raise UserError("model parallel groups do not exist: call initialize_model_parallel() first")
    return process_groups_config.default_collection()


def _group(name: str, check_initialized: bool = True) -> Any:
    if not check_initialized and not has_default_collection():
        return None
    return getattr(_groups(), name)


def _size(name: str) -> int:
    return _extras.overrides.get((name, "size")) or _groups().size(name)


def _rank(name: str) -> int:
    override = _extras.overrides.get((name, "rank"))
    return _groups().rank(name) if override is None else override


def _override(name: str, what: str, value: int | None) -> None:
    if value is None:
        _extras.overrides.pop((name, what), None)
    else:
        _extras.overrides[name, what] = value


# Functions that differ only in the group's name are made by the functions below.


def _group_getter(name: str) -> Callable[..., Group]:
    def get_group(check_initialized: bool = True) -> Group:
        """Returns the torch group; None for a single process, or before groups exist if `check_initialized` is
        False."""
        return _group(name, check_initialized)

    return get_group


def _size_getter(name: str) -> Callable[[], int]:
    return lambda: _size(name)


def _rank_getter(name: str) -> Callable[[], int]:
    return lambda: _rank(name)


def _first_rank_getter(name: str) -> Callable[[], int]:
    """Returns a getter of the global rank of a group's first member."""
    return lambda: _groups().ranks(name)[0]


def _size_setter(name: str) -> Callable[[int | None], None]:
    """Returns a setter of a size for tests; None removes the setting."""
    return lambda world_size: _override(name, "size", world_size)


def _rank_setter(name: str) -> Callable[[int | None], None]:
    return lambda rank: _override(name, "rank", rank)


# ---------------------------------------------------------------------------------------------------------------------
# Tensor, pipeline, model


get_tensor_model_parallel_group = _group_getter("tp")
get_tensor_model_parallel_world_size = _size_getter("tp")
get_tensor_model_parallel_rank = _rank_getter("tp")
set_tensor_model_parallel_world_size = _size_setter("tp")
set_tensor_model_parallel_rank = _rank_setter("tp")
get_tensor_model_parallel_src_rank = _first_rank_getter("tp")
get_pipeline_model_parallel_group = _group_getter("pp")
get_pipeline_model_parallel_world_size = _size_getter("pp")
get_pipeline_model_parallel_rank = _rank_getter("pp")
set_pipeline_model_parallel_world_size = _size_setter("pp")
set_pipeline_model_parallel_rank = _rank_setter("pp")
get_pipeline_model_parallel_first_rank = _first_rank_getter("pp")


def get_pipeline_model_parallel_last_rank() -> int:
    """Returns the global rank of the last stage of this rank's pipeline."""
    return _groups().ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Returns the global rank of the next stage; after the last one, of the first."""
    ranks = _groups().ranks("pp")
    return ranks[(_rank("pp") + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Returns the global rank of the previous stage; before the first one, of the last."""
    ranks = _groups().ranks("pp")
    return ranks[(_rank("pp") - 1) % len(ranks)]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Returns the number of chunks on each rank; None without virtual stages."""
    return _extras.virtual_stages


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None, *, v_shaped: bool = False) -> None:
    """Sets the number of chunks on each rank. With `v_shaped` (our own keyword) there are two, the second of which run
    from the last rank back to the first."""
    _extras.virtual_stages, _extras.v_shaped = world_size, v_shaped


def is_pipeline_v_shaped() -> bool:
    """Whether the second chunks run from the last rank back to the first, which has both ends of the model (our own
    function)."""
    return _extras.v_shaped


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Returns the chunk that was set as the current one; None without virtual stages."""
    return _extras.virtual_stage


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets the current chunk."""
    _extras.virtual_stage = rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank has the first stage; without `ignore_virtual`, whether its chunk `vp_stage` is the first
    one."""
    return _rank("pp") == 0 and (ignore_virtual or _chunk(vp_stage) == 0)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank has the last stage; without `ignore_virtual`, whether its chunk `vp_stage` is the last one."""
    last_chunk = (_extras.virtual_stages or 1) - 1
    last_rank = 0 if _extras.v_shaped else _size("pp") - 1
    return _rank("pp") == last_rank and (ignore_virtual or _chunk(vp_stage) == last_chunk)


def _chunk(vp_stage: int | None) -> int:
    return vp_stage if vp_stage is not None else _extras.virtual_stage or 0


get_model_parallel_group = _group_getter("mp")
get_model_parallel_src_rank = _first_rank_getter("mp")
get_embedding_group = _group_getter("embd")
get_position_embedding_group = _group_getter("pos_embd")


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank is in the embedding group; without `ignore_virtual`, whether its chunk `vp_stage` is an end of
    the model."""
    if _groups().rank("embd") < 0:
        return False
    if ignore_virtual:
        return True
    ends = is_pipeline_first_stage(), is_pipeline_last_stage()
    if not any(ends):
        return True
    return is_pipeline_first_stage(False, vp_stage) or is_pipeline_last_stage(False, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank has position embeddings."""
    return _groups().rank("pos_embd") >= 0


# ---------------------------------------------------------------------------------------------------------------------
# Data and context. Partial data parallel ranks are those of one instance of the sharded optimizer, if it has several.


def _data(with_context_parallel: bool, partial: bool = False) -> str:
    if partial and not with_context_parallel:
        raise UserError("partial_data_parallel goes with with_context_parallel=True: an instance spans both")
    if partial:
        return "intra_dp_cp"
    return "dp_cp" if with_context_parallel else "dp"


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, independent_all_gather: bool = False
) -> Group:
    """Returns the data (and context) parallel group; with `partial_data_parallel`, that of one optimizer instance."""
    return _group(_data(with_context_parallel, partial_data_parallel))


def get_data_parallel_group_gloo(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Group:
    """Returns the data parallel group for host tensors: the group itself, or a gloo group of the same ranks."""
    return _gloo(_data(with_context_parallel, partial_data_parallel))


def _gloo(name: str) -> Group:
    group = _group(name)
    if group is None or "gloo" in dist.get_backend_config(group):
        return group
    if name not in _extras.gloo_groups:
        ranks = list(_groups().ranks(name))
        _extras.gloo_groups[name] = create_group(ranks, backend="gloo", use_local_synchronization=True)
    return _extras.gloo_groups[name]


def has_separate_all_gather_group() -> bool:
    """Returns False: there is no separate group for all-gathers."""
    return False


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Returns the size of the data parallel group."""
    return _size(_data(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Returns this rank's index in the data parallel group."""
    return _rank(_data(with_context_parallel, partial_data_parallel))


set_data_parallel_rank = _rank_setter("dp")


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Returns the global rank of the first member of the data parallel group."""
    return _groups().ranks(_data(with_context_parallel))[0]


get_context_parallel_group = _group_getter("cp")


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """Returns the global ranks of the context parallel group."""
    return list(_groups().ranks("cp"))


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[Group]:
    """Returns one group for each level, innermost first."""
    return _group("hcp", check_initialized)


def get_hybrid_data_context_parallel_groups(check_initialized: bool = True, group_size: int | None = None) -> Group:
    """Raises UserError: hybrid context parallelism is not supported yet."""
    raise UserError("not yet: hybrid context parallelism")


get_context_parallel_world_size = _size_getter("cp")
get_context_parallel_rank = _rank_getter("cp")


def get_tensor_and_data_parallel_group(check_initialized: bool = True, with_context_parallel: bool = False) -> Group:
    """Returns the group of tensor and data (and context) parallel ranks."""
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


get_tensor_and_context_parallel_group = _group_getter("tp_cp")
get_tensor_and_context_parallel_world_size = _size_getter("tp_cp")
get_tensor_and_context_parallel_rank = _rank_getter("tp_cp")


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Group:
    """Returns the group of ranks with common fp8 scales."""
    if tp_only_amax_red:
        return _group("tp_cp" if with_context_parallel else "tp")
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


# ---------------------------------------------------------------------------------------------------------------------
# Experts


get_expert_model_parallel_group = _group_getter("ep")
get_expert_model_parallel_src_rank = _first_rank_getter("ep")
get_expert_model_parallel_world_size = _size_getter("ep")
set_expert_model_parallel_world_size = _size_setter("ep")
get_expert_model_parallel_rank = _rank_getter("ep")
set_expert_model_parallel_rank = _rank_setter("ep")
get_expert_tensor_parallel_group = _group_getter("expt_tp")
get_expert_tensor_parallel_world_size = _size_getter("expt_tp")
set_expert_tensor_parallel_world_size = _size_setter("expt_tp")
get_expert_tensor_parallel_rank = _rank_getter("expt_tp")
set_expert_tensor_parallel_rank = _rank_setter("expt_tp")
get_expert_tensor_and_model_parallel_group = _group_getter("tp_ep")
get_expert_tensor_and_model_parallel_world_size = _size_getter("tp_ep")
get_expert_tensor_and_model_parallel_rank = _rank_getter("tp_ep")
get_expert_tensor_model_pipeline_parallel_group = _group_getter("tp_ep_pp")


def _expert_data(partial: bool) -> str:
    return "intra_expt_dp" if partial else "expt_dp"


def get_expert_data_parallel_group(check_initialized: bool = True, partial_expert_data_parallel: bool = False) -> Group:
    """Returns the expert data parallel group; with `partial_expert_data_parallel`, that of one optimizer instance."""
    return _group(_expert_data(partial_expert_data_parallel), check_initialized)


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Group:
    """Former name of `get_expert_data_parallel_group`."""
    return _group(_expert_data(partial_expert_data_parallel))


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Group:
    """Returns the expert data parallel group for host tensors."""
    return _gloo(_expert_data(partial_expert_data_parallel))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Returns this rank's index in the expert data parallel group."""
    return _rank(_expert_data(partial_expert_data_parallel))


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Returns the size of the expert data parallel group."""
    return _size(_expert_data(partial_expert_data_parallel))


# ---------------------------------------------------------------------------------------------------------------------
# Other


get_intra_distributed_optimizer_instance_group = _group_getter("intra_dist_opt")
get_inter_distributed_optimizer_instance_group = _group_getter("inter_dist_opt")


def get_global_memory_buffer() -> Any:
    """Raises UserError: there is no global memory buffer."""
    raise UserError("there is no global memory buffer: torch's caching allocator serves temporary tensors")


get_global_symmetric_memory_buffer = get_global_memory_buffer


def destroy_global_memory_buffer() -> None:
    """Does nothing: there is no such buffer."""


destroy_global_symmetric_memory_buffer = destroy_global_memory_buffer


def get_all_ranks() -> str:
    """Returns this rank's indices along the tensor, data, context, pipeline and expert axes, joined by underscores."""
    return "_".join(str(_rank(name)) for name in ("tp", "dp", "cp", "pp", "ep"))
