"""The library: parallel parts of transformers, which take explicit arguments.

The names below are imported at their first use, so that `import megatron.core` is fast.
"""

from megatron.homes import lazy_names

__all__ = [
    "InferenceParams",
    "ModelParallelConfig",
    "Timers",
    "__version__",
    "dist_checkpointing",
    "distributed",
    "mpu",
    "parallel_state",
    "tensor_parallel",
    "utils",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ModelParallelConfig": "megatron.core.declarations.model_parallel_config",
        "InferenceParams": "megatron.core.inference.static_context:StaticInferenceContext",
        "Timers": "megatron.core.timers",
        "__version__": "megatron.core.utils.versions:MEGATRON_LM_RELEASE",
        "dist_checkpointing": "megatron.core.dist_checkpointing:",
        "distributed": "megatron.core.distributed:",
        "mpu": "megatron.facades.parallel_state:",  # the older name
        "parallel_state": "megatron.facades.parallel_state:",
        "tensor_parallel": "megatron.core.tensor_parallel:",
        "utils": "megatron.core.utils:",
    },
)
