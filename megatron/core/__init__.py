"""The library: parallel parts of transformers, which take explicit arguments.

The names below are imported at their first use, so that `import megatron.core` is fast.
"""

import importlib
from typing import Any

_HOMES = {
    "ModelParallelConfig": "megatron.core.model_parallel_config",
    "Timers": "megatron.core.timers",
}
"""The modules of names that are not modules themselves."""

_MODULES = ("dist_checkpointing", "parallel_state", "tensor_parallel")

__all__ = ["ModelParallelConfig", "Timers", "dist_checkpointing", "mpu", "parallel_state", "tensor_parallel"]


def __getattr__(name: str) -> Any:
    if name == "mpu":  # the older name
        return importlib.import_module("megatron.core.parallel_state")
    if name in _MODULES:
        return importlib.import_module(f"megatron.core.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'megatron.core' has no attribute {name!r}")
