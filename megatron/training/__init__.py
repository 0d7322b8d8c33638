"""The app: flags, the loop, logs, checkpoints. Megatron-LM's public names can be imported from here.

A name is imported when it is first used, so that a tool that prepares data does not import torch.
"""

from megatron.homes import lazy_names

_HOMES = {
    "pretrain": "megatron.facades.pretrain",
    "get_args": "megatron.facades.global_vars",
    "get_signal_handler": "megatron.facades.global_vars",
    "get_tensorboard_writer": "megatron.facades.global_vars",
    "get_timers": "megatron.facades.global_vars",
    "get_tokenizer": "megatron.facades.global_vars",
    "get_wandb_writer": "megatron.facades.global_vars",
    "get_one_logger": "megatron.facades.global_vars",
    "get_adlr_autoresume": "megatron.facades.global_vars",
    "initialize_megatron": "megatron.facades.initialize",
    "get_current_global_batch_size": "megatron.facades.num_microbatches_calculator",
    "get_model": "megatron.facades.training",
    "get_num_microbatches": "megatron.facades.num_microbatches_calculator",
    "update_num_microbatches": "megatron.facades.num_microbatches_calculator",
    "set_startup_timestamps": "megatron.training.launch.start_times",
    "setup_model_and_optimizer": "megatron.facades.training",
    "train_step": "megatron.facades.training",
    "save_checkpoint": "megatron.facades.checkpointing",
    "load_checkpoint": "megatron.facades.checkpointing",
    "is_last_rank": "megatron.facades.utils",
    "print_rank_0": "megatron.facades.utils",
    "print_rank_last": "megatron.facades.utils",
}
"""The module that defines each name."""

__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
