"""The app: flags, the loop, logs, checkpoints. The published names work from here.

Names below are imported when they are first used, so that a tool that needs a part does not import the whole.
"""

import importlib
from typing import Any

_HOMES = {
    "pretrain": "megatron.training.training",
    "get_args": "megatron.training.global_vars",
    "get_tensorboard_writer": "megatron.training.global_vars",
    "get_timers": "megatron.training.global_vars",
    "get_tokenizer": "megatron.training.global_vars",
    "get_wandb_writer": "megatron.training.global_vars",
    "initialize_megatron": "megatron.training.megatron_lm_api",
    "get_model": "megatron.training.megatron_lm_api",
    "setup_model_and_optimizer": "megatron.training.megatron_lm_api",
    "train_step": "megatron.training.megatron_lm_api",
    "save_checkpoint": "megatron.training.checkpointing",
    "load_checkpoint": "megatron.training.checkpointing",
    "is_last_rank": "megatron.training.utils",
    "print_rank_0": "megatron.training.utils",
    "print_rank_last": "megatron.training.utils",
}
"""Where each name lives."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'megatron.training' has no attribute {name!r}")
