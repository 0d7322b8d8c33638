"""The settings of a run that a trainer gives: this package's, or Lightning's, which have the same attributes."""

import datetime
import os
from pathlib import Path

import torch

from megatron.facades.nemo.lightning.arguments import Foreign, shown
from megatron.facades.nemo.lightning.data import StageData
from megatron.facades.nemo.lightning.flags import Flags
from megatron.facades.nemo.lightning.folders import give_logger, give_saving, is_checkpoint_callback
from megatron.facades.nemo.lightning.precision import give_precision
from megatron.facades.nemo.lightning.run_callbacks import RunCallback

_REFUSED = {
    "fast_dev_run": "give max_steps=1 and limit_val_batches=1",
    "overfit_batches": "give a data set of a few samples",
    "_detect_anomaly": "a non-finite step is found and computed again without it (docs/failures.md)",
    "limit_predict_batches": "leave it out; predict does not exist here",
    "reload_dataloaders_every_n_epochs": "leave it out; data are opened once",
}
"""Attributes of a trainer that must have no value, with what to do instead."""


def give_trainer(flags: Flags, trainer: Foreign, stage: str, data: StageData) -> None:
    """Adds the settings of the length of a run, its evaluations, logs, checkpoints and number formats."""
    if hasattr(trainer, "give_flags"):
        trainer.give_flags(flags)
    _choose_device(flags, trainer)
    _give_ranks(flags, trainer)
    _give_length(flags, trainer, stage)
    _give_evaluations(flags, trainer, stage, data)
    _give_precision(flags, trainer)
    flags.give("log_interval", int(trainer.log_every_n_steps or 1))
    if trainer.gradient_clip_val is not None:
        flags.give("clip_grad", float(trainer.gradient_clip_val))
    if str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower() != "norm":
        flags.refuse("gradient_clip_algorithm", 'give "norm"')
    if getattr(trainer, "deterministic", None):
        flags.give("deterministic_mode", True)
    seed = os.environ.get("PL_GLOBAL_SEED")  # set by seed_everything
    if seed is not None:
        flags.give("seed", int(seed))
    for name, advice in _REFUSED.items():
        value = getattr(trainer, name, None)
        if value and (value is True or value != 1.0):
            flags.refuse(f"{name.strip('_')}={shown(value)}", advice)
    _give_folders(flags, trainer, stage)


def _choose_device(flags: Flags, trainer: Foreign) -> None:
    """Hides the GPUs from the run if the trainer asks for the CPU. Adds a problem if it asks for a GPU in vain."""
    asked = trainer.accelerator if isinstance(trainer.accelerator, str) else type(trainer.accelerator).__name__.lower()
    if asked.startswith("cpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif asked in ("gpu", "cuda") and not torch.cuda.is_available():
        flags.refuse(f'accelerator="{asked}"', 'this machine has no GPU that torch sees; give "cpu"')
    elif asked not in ("gpu", "cuda", "auto") and not asked.startswith("cuda"):
        flags.refuse(f'accelerator="{asked}"', 'give "gpu", "cpu" or "auto"')


def _give_ranks(flags: Flags, trainer: Foreign) -> None:
    """Adds a problem if the launcher has started another number of processes than the trainer asks for."""
    of_strategy = getattr(trainer.strategy, "parallel_devices", None)  # Lightning's Trainer itself counts one
    devices = len(of_strategy) if of_strategy else trainer.num_devices
    if isinstance(devices, int) and devices * trainer.num_nodes != flags.world_size:
        flags.refuse(
            f"devices={devices}, num_nodes={trainer.num_nodes}",
            f"the launcher has started {flags.world_size} processes; start the script with torchrun "
            f"--nproc_per_node {devices}, on each of {trainer.num_nodes} nodes",
        )


def _give_length(flags: Flags, trainer: Foreign, stage: str) -> None:
    if stage != "fit":
        flags.give("skip_train", True)
        return
    if trainer.max_steps is None or trainer.max_steps < 1:
        flags.refuse(f"max_steps={trainer.max_steps}", "give the number of steps; the length of a run is not in epochs")
    else:
        flags.give("train_iters", trainer.max_steps)
    if trainer.max_epochs not in (None, -1, 1, 1000):
        flags.note(f"max_epochs={trainer.max_epochs} has no effect: a run ends after max_steps")
    if trainer.limit_train_batches not in (None, 1.0):
        flags.refuse(f"limit_train_batches={shown(trainer.limit_train_batches)}", "give max_steps")
    minutes = minutes_of(getattr(trainer, "max_time", None))
    if minutes:
        flags.give("exit_duration_in_mins", minutes)


def minutes_of(limit: object) -> int:
    """Returns the minutes of a `max_time`: text DD:HH:MM:SS, a timedelta, or its keyword arguments; 0 for None. At
    least 1."""
    if limit is None:
        return 0
    if isinstance(limit, str):
        days, hours, minutes, seconds = (int(part) for part in limit.split(":"))
        limit = datetime.timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif isinstance(limit, dict):
        limit = datetime.timedelta(**limit)
    assert isinstance(limit, datetime.timedelta)
    return max(1, round(limit.total_seconds() / 60))


def _give_evaluations(flags: Flags, trainer: Foreign, stage: str, data: StageData) -> None:
    """Adds the number of global batches of an evaluation: a number, or the whole set exactly once."""
    name = "limit_test_batches" if stage == "test" else "limit_val_batches"
    limit = getattr(trainer, name)
    limit = 0 if limit == 0.0 else limit  # the share nothing
    if isinstance(limit, int) and not isinstance(limit, bool):
        flags.give("eval_iters", limit)
    elif limit in (None, 1.0) and data.reads_flags and hasattr(data.datamodule, "batches_of_whole_set"):
        ends_no_epoch = stage == "fit" and trainer.val_check_interval in (None, 1.0)
        flags.give("eval_iters", 0 if ends_no_epoch else data.datamodule.batches_of_whole_set(stage))
        if ends_no_epoch:
            flags.note("no evaluation: made-up data have no end of an epoch; give val_check_interval=STEPS for one")
    elif limit in (None, 1.0):
        has_data = data.reads_flags or data.loaders.get("test" if stage == "test" else "valid") is not None
        flags.give("eval_iters", int(has_data))
        flags.give("full_validation", has_data)
        data.takes_whole_test = stage == "test"
        if data.takes_whole_test:
            flags.note("the whole test set is read as the validation set, and the log calls it so")
    else:
        flags.refuse(f"{name}={shown(limit)}", "give a number of global batches, or 1.0 for the whole set")
    interval = trainer.val_check_interval
    if stage != "fit":
        return
    if isinstance(interval, int) and not isinstance(interval, bool):
        flags.give("eval_interval", interval)
    elif interval not in (None, 1.0):
        flags.refuse(f"val_check_interval={shown(interval)}", "give a number of steps")
    if trainer.num_sanity_val_steps:
        flags.note(f"num_sanity_val_steps={trainer.num_sanity_val_steps} has no effect: nothing is validated at first")


def _give_precision(flags: Flags, trainer: Foreign) -> None:
    plugin = trainer.precision_plugin
    if hasattr(plugin, "give_flags"):
        plugin.give_flags(flags)
    elif trainer.precision is not None:
        give_precision(flags, trainer.precision)
    dtype = torch.bfloat16 if flags.values.get("bf16") else torch.float16 if flags.values.get("fp16") else torch.float32
    trainer.strategy.check_pipeline_dtype(flags, dtype)


def _give_folders(flags: Flags, trainer: Foreign, stage: str) -> None:
    in_background, root = trainer.strategy.ckpt_async_save, Path(trainer.default_root_dir)
    log, resume = getattr(trainer, "nemo_log", None), getattr(trainer, "nemo_resume", None)
    for callback in trainer.callbacks:
        if is_checkpoint_callback(callback) and stage == "fit":
            give_saving(flags, callback, str(root / "checkpoints"), in_background)
        elif isinstance(callback, RunCallback):
            callback.give_flags(flags)
    for logger in trainer.loggers:
        if type(logger).__name__ == "CSVLogger":
            flags.note("CSVLogger writes nothing: --metrics-file (MegatronStrategy(flags=[...])) writes JSON lines")
        else:
            give_logger(flags, logger, str(root))
    if log is not None:
        log.give_flags(flags, in_background)
    if resume is not None:
        resume.give_flags(flags)
