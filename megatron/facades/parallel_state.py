"""Megatron-LM's functions about process groups, for user scripts.

`initialize_model_parallel` makes the default groups (default_groups.py); the getters read them. The library itself
passes groups as arguments and does not import this module.
"""

from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import first_and_last, first_only
from megatron.core.utils.torch_groups import create_group as create_group
from megatron.core.utils.torch_groups import create_hierarchical_groups as create_hierarchical_groups
from megatron.core.utils.torch_groups import create_hybrid_dp_cp_groups as create_hybrid_dp_cp_groups
from megatron.core.utils.torch_groups import (
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
from megatron.core.utils.torch_groups import get_nccl_options as get_nccl_options
from megatron.core.utils.torch_groups import overwrite_nccl_comm_cfgs as overwrite_nccl_comm_cfgs
from megatron.core.utils.torch_groups import update_pg_timeout as update_pg_timeout
from megatron.facades.default_groups import (
    Group,
    extras,
    first_rank_getter,
    gloo_group_of,
    group_getter,
    group_of,
    groups,
    rank_getter,
    rank_of,
    rank_setter,
    size_getter,
    size_of,
    size_setter,
)
from megatron.facades.default_groups import destroy_model_parallel as destroy_model_parallel
from megatron.facades.default_groups import initialize_model_parallel as initialize_model_parallel
from megatron.facades.default_groups import is_initialized as is_initialized
from megatron.facades.default_groups import is_unitialized as is_unitialized

default_embedding_ranks = first_and_last
default_position_embedding_ranks = first_only
model_parallel_is_initialized = is_initialized

# ---------------------------------------------------------------------------------------------------------------------
# Tensor, pipeline, model


get_tensor_model_parallel_group = group_getter("tp")
get_tensor_model_parallel_world_size = size_getter("tp")
get_tensor_model_parallel_rank = rank_getter("tp")
set_tensor_model_parallel_world_size = size_setter("tp")
set_tensor_model_parallel_rank = rank_setter("tp")
get_tensor_model_parallel_src_rank = first_rank_getter("tp")
get_pipeline_model_parallel_group = group_getter("pp")
get_pipeline_model_parallel_world_size = size_getter("pp")
get_pipeline_model_parallel_rank = rank_getter("pp")
set_pipeline_model_parallel_world_size = size_setter("pp")
set_pipeline_model_parallel_rank = rank_setter("pp")
get_pipeline_model_parallel_first_rank = first_rank_getter("pp")


def get_pipeline_model_parallel_last_rank() -> int:
    """Returns the global rank of the last stage of this rank's pipeline."""
    return groups().ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Returns the global rank of the next stage; after the last one, of the first."""
    ranks = groups().ranks("pp")
    return ranks[(rank_of("pp") + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Returns the global rank of the previous stage; before the first one, of the last."""
    ranks = groups().ranks("pp")
    return ranks[(rank_of("pp") - 1) % len(ranks)]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Returns the number of chunks on each rank; None without virtual stages."""
    return extras.virtual_stages


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None, *, v_shaped: bool = False) -> None:
    """Sets the number of chunks on each rank. With `v_shaped` (our own keyword) there are two, and the second chunks go
    from the last rank back to the first."""
    extras.virtual_stages, extras.v_shaped = world_size, v_shaped


def is_pipeline_v_shaped() -> bool:
    """Whether the second chunks go from the last rank back to the first, so that the first rank has both ends of the
    model (our own function)."""
    return extras.v_shaped


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Returns the chunk that was set as the current one; None without virtual stages."""
    return extras.virtual_stage


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets the current chunk."""
    extras.virtual_stage = rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank has the first stage; without `ignore_virtual`, whether its chunk `vp_stage` is the first
    one."""
    return rank_of("pp") == 0 and (ignore_virtual or _chunk(vp_stage) == 0)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank has the last stage; without `ignore_virtual`, whether its chunk `vp_stage` is the last one."""
    last_chunk = (extras.virtual_stages or 1) - 1
    last_rank = 0 if extras.v_shaped else size_of("pp") - 1
    return rank_of("pp") == last_rank and (ignore_virtual or _chunk(vp_stage) == last_chunk)


def _chunk(vp_stage: int | None) -> int:
    return vp_stage if vp_stage is not None else extras.virtual_stage or 0


get_model_parallel_group = group_getter("mp")
get_model_parallel_src_rank = first_rank_getter("mp")
get_embedding_group = group_getter("embd")
get_position_embedding_group = group_getter("pos_embd")


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank is in the embedding group; without `ignore_virtual`, whether its chunk `vp_stage` is an end of
    the model."""
    if groups().rank("embd") < 0:
        return False
    if ignore_virtual:
        return True
    ends = is_pipeline_first_stage(), is_pipeline_last_stage()
    if not any(ends):
        return True
    return is_pipeline_first_stage(False, vp_stage) or is_pipeline_last_stage(False, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank has position embeddings."""
    return groups().rank("pos_embd") >= 0


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
    return group_of(_data(with_context_parallel, partial_data_parallel))


def get_data_parallel_group_gloo(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Group:
    """Returns the data parallel group for host tensors: the group itself, or a gloo group of the same ranks."""
    return gloo_group_of(_data(with_context_parallel, partial_data_parallel))


def has_separate_all_gather_group() -> bool:
    """Returns False: there is no separate group for all-gathers."""
    return False


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Returns the size of the data parallel group."""
    return size_of(_data(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Returns this rank's index in the data parallel group."""
    return rank_of(_data(with_context_parallel, partial_data_parallel))


set_data_parallel_rank = rank_setter("dp")


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Returns the global rank of the first member of the data parallel group."""
    return groups().ranks(_data(with_context_parallel))[0]


get_context_parallel_group = group_getter("cp")


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """Returns the global ranks of the context parallel group."""
    return list(groups().ranks("cp"))


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[Group]:
    """Returns one group for each level, innermost first."""
    return group_of("hcp", check_initialized)


def get_hybrid_data_context_parallel_groups(check_initialized: bool = True, group_size: int | None = None) -> Group:
    """Raises UserError: hybrid context parallelism is not supported yet."""
    raise UserError("not yet: hybrid context parallelism")


get_context_parallel_world_size = size_getter("cp")
get_context_parallel_rank = rank_getter("cp")


def get_tensor_and_data_parallel_group(check_initialized: bool = True, with_context_parallel: bool = False) -> Group:
    """Returns the group of tensor and data (and context) parallel ranks."""
    return group_of("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


get_tensor_and_context_parallel_group = group_getter("tp_cp")
get_tensor_and_context_parallel_world_size = size_getter("tp_cp")
get_tensor_and_context_parallel_rank = rank_getter("tp_cp")


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Group:
    """Returns the group of ranks with common fp8 scales."""
    if tp_only_amax_red:
        return group_of("tp_cp" if with_context_parallel else "tp")
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


# ---------------------------------------------------------------------------------------------------------------------
# Experts


get_expert_model_parallel_group = group_getter("ep")
get_expert_model_parallel_src_rank = first_rank_getter("ep")
get_expert_model_parallel_world_size = size_getter("ep")
set_expert_model_parallel_world_size = size_setter("ep")
get_expert_model_parallel_rank = rank_getter("ep")
set_expert_model_parallel_rank = rank_setter("ep")
get_expert_tensor_parallel_group = group_getter("expt_tp")
get_expert_tensor_parallel_world_size = size_getter("expt_tp")
set_expert_tensor_parallel_world_size = size_setter("expt_tp")
get_expert_tensor_parallel_rank = rank_getter("expt_tp")
set_expert_tensor_parallel_rank = rank_setter("expt_tp")
get_expert_tensor_and_model_parallel_group = group_getter("tp_ep")
get_expert_tensor_and_model_parallel_world_size = size_getter("tp_ep")
get_expert_tensor_and_model_parallel_rank = rank_getter("tp_ep")
get_expert_tensor_model_pipeline_parallel_group = group_getter("tp_ep_pp")


def _expert_data(partial: bool) -> str:
    return "intra_expt_dp" if partial else "expt_dp"


def get_expert_data_parallel_group(check_initialized: bool = True, partial_expert_data_parallel: bool = False) -> Group:
    """Returns the expert data parallel group; with `partial_expert_data_parallel`, that of one optimizer instance."""
    return group_of(_expert_data(partial_expert_data_parallel), check_initialized)


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Group:
    """Returns the result of `get_expert_data_parallel_group`, the newer name of this function."""
    return group_of(_expert_data(partial_expert_data_parallel))


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Group:
    """Returns the expert data parallel group for host tensors."""
    return gloo_group_of(_expert_data(partial_expert_data_parallel))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Returns this rank's index in the expert data parallel group."""
    return rank_of(_expert_data(partial_expert_data_parallel))


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Returns the size of the expert data parallel group."""
    return size_of(_expert_data(partial_expert_data_parallel))


# ---------------------------------------------------------------------------------------------------------------------
# Other


get_intra_distributed_optimizer_instance_group = group_getter("intra_dist_opt")
get_inter_distributed_optimizer_instance_group = group_getter("inter_dist_opt")


def get_global_memory_buffer() -> Any:
    """Raises UserError: there is no global memory buffer."""
    raise UserError("there is no global memory buffer: torch's caching allocator serves temporary tensors")


get_global_symmetric_memory_buffer = get_global_memory_buffer


def destroy_global_memory_buffer() -> None:
    """Does nothing: there is no such buffer."""


destroy_global_symmetric_memory_buffer = destroy_global_memory_buffer


def get_all_ranks() -> str:
    """Returns this rank's indices along the tensor, data, context, pipeline and expert axes, joined by underscores."""
    return "_".join(str(rank_of(name)) for name in ("tp", "dp", "cp", "pp", "ep"))
