"""The app: flags, the loop, logs, checkpoints. Megatron-LM's public names can be imported from here.

A name is imported when it is first used, so that a tool that prepares data does not import torch.
"""

from megatron.homes import lazy_names

_HOMES = {
    "pretrain": "megatron.training.training",
    "get_args": "megatron.training.global_vars",
    "get_signal_handler": "megatron.training.global_vars",
    "get_tensorboard_writer": "megatron.training.global_vars",
    "get_timers": "megatron.training.global_vars",
    "get_tokenizer": "megatron.training.global_vars",
    "get_wandb_writer": "megatron.training.global_vars",
    "get_one_logger": "megatron.training.global_vars",
    "get_adlr_autoresume": "megatron.training.global_vars",
    "initialize_megatron": "megatron.training.initialize",
    "get_current_global_batch_size": "megatron.core.num_microbatches_calculator",
    "get_model": "megatron.training.training",
    "get_num_microbatches": "megatron.core.num_microbatches_calculator",
    "update_num_microbatches": "megatron.core.num_microbatches_calculator",
    "set_startup_timestamps": "megatron.training.launch.start_times",
    "setup_model_and_optimizer": "megatron.training.training",
    "train_step": "megatron.training.training",
    "save_checkpoint": "megatron.training.checkpointing",
    "load_checkpoint": "megatron.training.checkpointing",
    "is_last_rank": "megatron.training.utils",
    "print_rank_0": "megatron.training.utils",
    "print_rank_last": "megatron.training.utils",
}
"""The module that defines each name."""

__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
