"""Small functions that all of the library uses. Megatron-LM's names are imported at their first use."""

from megatron.homes import lazy_names

_HOMES = {
    "StragglerDetector": "megatron.core.health.straggler_detector",
    "divide": "megatron.core.tensor_parallel.utils",
    "ensure_divisibility": "megatron.core.tensor_parallel.utils",
    "flatten_batch_for_packed_sequences": "megatron.facades.batches",
    "get_attr_wrapped_model": "megatron.core.utils.wrapped_models",
    "get_batch_on_this_cp_rank": "megatron.core.context_parallel.batches",
    "get_batch_on_this_hybrid_cp_rank": "megatron.core.context_parallel.batches",
    "get_batch_on_this_tp_rank": "megatron.facades.batches",
    "get_model_config": "megatron.core.utils.wrapped_models",
    "get_pg_rank": "megatron.core.communication.collectives:group_rank",
    "get_pg_size": "megatron.core.communication.collectives:group_size",
    "get_te_version": "megatron.core.utils.versions",
    "get_thd_batch_on_this_cp_rank": "megatron.core.context_parallel.batches",
    "get_torch_version": "megatron.core.utils.versions",
    "init_method_normal": "megatron.core.initializers",
    "is_te_min_version": "megatron.core.utils.versions",
    "is_torch_min_version": "megatron.core.utils.versions",
    "log_single_rank": "megatron.core.utils.warn",
    "make_sharded_tensor_for_checkpoint": "megatron.core.tensor_parallel.sharded_state",
    "make_tp_sharded_tensor_for_checkpoint": "megatron.core.tensor_parallel.sharded_state",
    "make_viewless_tensor": "megatron.core.pipeline_parallel.utils",
    "nvtx_decorator": "megatron.core.utils.nvtx",
    "nvtx_range_pop": "megatron.core.utils.nvtx",
    "nvtx_range_push": "megatron.core.utils.nvtx",
    "scaled_init_method_normal": "megatron.core.initializers",
    "unwrap_model": "megatron.core.utils.wrapped_models",
}
"""The module that defines each name."""

__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
