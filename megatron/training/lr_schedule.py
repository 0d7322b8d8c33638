"""Builds the schedule of learning rate and weight decay, which counts samples, and names its settings as flags."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config.flag_table import spelling_of
from megatron.training.config.pretrain_config import PretrainConfig


def build_scheduler(
    config: PretrainConfig,
    optimizer: MegatronOptimizer,
    kind: type[OptimizerParamScheduler] = OptimizerParamScheduler,
) -> OptimizerParamScheduler:
    """Returns the scheduler that the flags describe. It counts samples; an iteration has as many as its global batch,
    which may grow. `kind` is its class, for a script with a formula of its own (`OptimizerParamScheduler.rate`)."""
    schedule, training, rates = config.schedule, config.training, config.optimizer
    batches = BatchSchedule.from_config(training, config.grid.data, config.data.seq_length)

    def samples(of_samples: int | None, of_iterations: int | None) -> int:
        return of_samples or batches.samples_of(of_iterations or 0)

    # A run that only evaluates needs no length and no rate; a schedule of one step is then as good as any.
    total = samples(training.train_samples, training.train_iters) or batches.final_global_batch_size
    decay = samples(schedule.lr_decay_samples, schedule.lr_decay_iters) or total
    wsd_decay = schedule.lr_wsd_decay_samples
    if schedule.lr_wsd_decay_iters:  # of the last iterations
        before = (schedule.lr_decay_iters or training.train_iters) - schedule.lr_wsd_decay_iters
        wsd_decay = decay - batches.samples_of(before)
    warmup: float = samples(schedule.lr_warmup_samples, schedule.lr_warmup_iters)
    if schedule.lr_warmup_fraction is not None:  # not rounded, as in Megatron-LM
        warmup = schedule.lr_warmup_fraction * decay
    updates = schedule.lr_warmup_iters or warmup / batches.final_global_batch_size
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    return kind(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=rates.lr or 0.0,
        min_lr=rates.min_lr or 0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=rates.weight_decay if start is None else start,
        end_wd=rates.weight_decay if end is None else end,
        wd_incr_steps=total,
        wd_incr_style=schedule.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=schedule.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=schedule.override_opt_param_scheduler,
        wsd_decay_steps=wsd_decay or None,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        decoupled_lr=rates.decoupled_lr,
        decoupled_min_lr=rates.decoupled_min_lr,
        lr_warmup_log_steps=updates if schedule.lr_warmup_style == "log" else None,
    )


def check_schedule(config: PretrainConfig, saved: dict[str, object]) -> None:
    """Raises UserError if the schedule of the flags cannot continue the one that a checkpoint saved. Needs no model."""
    without_parameters: Any = SimpleNamespace(param_groups=[])
    scheduler = build_scheduler(config, without_parameters)
    scheduler.load_state_dict(saved, partial(schedule_flag, config), log=lambda line: None)


def schedule_flag(config: PretrainConfig, name: str) -> str:
    """Returns the flag that sets an attribute of the scheduler: the one that was given, else the usual one. Where the
    scheduler counts samples and the flag iterations, the text says so."""
    given = [field for field, source in config.provenance.items() if source in ("flag", "recipe")]
    counted = name in _COUNTED
    usual = _WAYS[name][-1 if counted and "train_samples" in given else 0]
    spelled = spelling_of(next((field for field in _WAYS[name] if field in given), usual))
    return f"{spelled} (in samples)" if counted else spelled


_COUNTED = {
    "lr_warmup_steps": ("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples"),
    "lr_decay_steps": ("lr_decay_iters", "lr_decay_samples", "train_iters", "train_samples"),
    "wd_incr_steps": ("train_iters", "train_samples"),
}
_WAYS = _COUNTED | {
    "max_lr": ("lr",),
    "min_lr": ("min_lr",),
    "lr_decay_style": ("lr_decay_style",),
    "start_wd": ("start_weight_decay", "weight_decay"),
    "end_wd": ("end_weight_decay", "weight_decay"),
    "wd_incr_style": ("weight_decay_incr_style",),
}
"""Attributes of the schedule that must agree with a checkpoint, each with the config fields that can set it. The first
of these fields that was given is the one to name."""
