"""The app: flags, the loop, logs, checkpoints. The published names work from here.

Names below are imported when they are first used, so that a tool that needs a part does not import the whole.
"""

import importlib
from typing import Any

_HOMES = {"pretrain": "megatron.training.training"}
"""Where each name lives."""

__all__ = ["pretrain"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'megatron.training' has no attribute {name!r}")
