"""Small functions that all of the library uses. Megatron-LM's names are imported at their first use."""

from megatron.homes import lazy_names

_HOMES = {
    "StragglerDetector": "megatron.core.straggler_detector",
    "divide": "megatron.core.tensor_parallel.utils",
    "get_attr_wrapped_model": "megatron.core.utils.wrapped_models",
    "get_batch_on_this_cp_rank": "megatron.core.context_parallel.batches",
    "get_batch_on_this_hybrid_cp_rank": "megatron.core.context_parallel.batches",
    "get_model_config": "megatron.core.utils.wrapped_models",
    "get_te_version": "megatron.core.utils.versions",
    "get_thd_batch_on_this_cp_rank": "megatron.core.context_parallel.batches",
    "get_torch_version": "megatron.core.utils.versions",
    "is_te_min_version": "megatron.core.utils.versions",
    "is_torch_min_version": "megatron.core.utils.versions",
    "make_viewless_tensor": "megatron.core.pipeline_parallel.utils",
}
"""The module that defines each name."""

__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
