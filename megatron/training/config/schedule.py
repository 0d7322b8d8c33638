"""How learning rate and weight decay move."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag


@dataclass(kw_only=True, frozen=True)
class ScheduleConfig:
    """Warm-up, decay, and what a checkpoint may say about them. All is counted in samples."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the learning rate after warm-up; WSD: constant, then a decay at the end."""

    lr_decay_iters: int | None = None
    """Steps until the learning rate has come down to --min-lr; --train-iters when not given."""

    lr_decay_samples: int | None = None
    """With --train-samples: samples until the learning rate has come down; --train-samples when not given."""

    lr_warmup_fraction: float | None = None
    """Part of the decay steps (or samples) in which the learning rate rises."""

    lr_warmup_iters: int = 0
    """Steps in which the learning rate rises."""

    lr_warmup_samples: int = 0
    """With --train-samples: samples in which the learning rate rises."""

    lr_warmup_init: float = 0.0
    """Learning rate that warm-up begins at."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", only_with="lr_decay_style=WSD"
    )
    """With WSD: shape of the decay at the end."""

    lr_wsd_decay_iters: int | None = flag(None, only_with="lr_decay_style=WSD")
    """With WSD: steps of the decay at the end."""

    lr_wsd_decay_samples: int | None = flag(None, only_with="lr_decay_style=WSD")
    """With WSD and --train-samples: samples of the decay at the end."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay moves from --start-weight-decay to --end-weight-decay."""

    start_weight_decay: float | None = flag(None)
    """Weight decay at the start."""

    end_weight_decay: float | None = flag(None)
    """Weight decay at the end of training."""

    override_opt_param_scheduler: bool = flag(
        False, on="--override-opt_param-scheduler", aliases=["--override-opt-param-scheduler"]
    )
    """On loading, the schedule is that of the flags, not of the checkpoint."""

    use_checkpoint_opt_param_scheduler: bool = flag(
        False, on="--use-checkpoint-opt_param-scheduler", aliases=["--use-checkpoint-opt-param-scheduler"]
    )
    """On loading, the schedule is that of the checkpoint, not of the flags."""
