"""The run's learning rate and weight decay, counted in samples."""

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.config.pretrain_config import PretrainConfig


def build_scheduler(config: PretrainConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The scheduler that the flags describe; flags in iterations count as so many full global batches."""
    schedule, training, rates = config.schedule, config.training, config.optimizer
    batch = training.global_batch_size
    assert batch is not None

    def samples(of_samples: int | None, of_iterations: int | None) -> int:
        return of_samples or (of_iterations or 0) * batch

    # A run that only evaluates needs no length and no rate; a schedule of one step is then as good as any.
    total = samples(training.train_samples, training.train_iters) or batch
    decay = samples(schedule.lr_decay_samples, schedule.lr_decay_iters) or total
    warmup = samples(schedule.lr_warmup_samples, schedule.lr_warmup_iters)
    if schedule.lr_warmup_fraction is not None:
        warmup = int(schedule.lr_warmup_fraction * decay)
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    return OptimizerParamScheduler(
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
        wsd_decay_steps=samples(schedule.lr_wsd_decay_samples, schedule.lr_wsd_decay_iters) or None,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
