"""The learning rate and weight decay over the course of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag, too_small


@dataclass(kw_only=True, frozen=True)
class ScheduleConfig:
    """Warm-up and decay of the learning rate, growth of weight decay, and which schedule a resumed run follows.

    The schedule counts samples. A flag in steps stands for that many full global batches.
    """

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the learning rate after warm-up. WSD (warm-up, stable, decay): constant, then a decay at the end."""

    lr_decay_iters: int | None = flag(None, only_with="lr_decay_style!=constant", or_with="lr_warmup_fraction")
    """Steps until the learning rate reaches --min-lr; --train-iters when not given."""

    lr_decay_samples: int | None = flag(None, only_with="lr_decay_style!=constant", or_with="lr_warmup_fraction")
    """With --train-samples: samples until the learning rate reaches --min-lr; --train-samples when not given."""

    lr_warmup_fraction: float | None = None
    """Length of warm-up as a fraction of --lr-decay-iters (or --lr-decay-samples). At least 0 and less than 1; the
    product is not rounded."""

    lr_warmup_iters: int = 0
    """Length of warm-up in steps. The learning rate rises as --lr-warmup-style says."""

    lr_warmup_samples: int = 0
    """With --train-samples: length of warm-up in samples."""

    lr_warmup_style: Literal["linear", "log"] = flag(
        "linear", only_with="lr_warmup_iters", or_with=("lr_warmup_samples", "lr_warmup_fraction")
    )
    """Shape of the warm-up: linear, or with the logarithm of the step, as DeepSpeed's schedules do by default."""

    dump_param_to_param_group_map: str | None = None
    """JSON file to write. It has the settings of each parameter's group: factors of weight decay and learning rate, and
    the group's own learning rates."""

    lr_warmup_init: float = flag(0.0, only_with="lr_warmup_iters", or_with=("lr_warmup_samples", "lr_warmup_fraction"))
    """Learning rate at the start of warm-up."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", only_with="lr_decay_style=WSD"
    )
    """With WSD: shape of the decay at the end."""

    lr_wsd_decay_iters: int | None = flag(None, only_with="lr_decay_style=WSD")
    """With WSD: length of the decay at the end, in steps."""

    lr_wsd_decay_samples: int | None = flag(None, only_with="lr_decay_style=WSD")
    """With WSD and --train-samples: length of the decay at the end, in samples."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay changes from --start-weight-decay to --end-weight-decay."""

    start_weight_decay: float | None = flag(None)
    """Weight decay at the first step."""

    end_weight_decay: float | None = flag(None)
    """Weight decay at the last step."""

    override_opt_param_scheduler: bool = flag(
        False,
        on="--override-opt_param-scheduler",
        aliases=["--override-opt-param-scheduler"],
        only_with=("load", "finetune!=True"),
    )
    """When a checkpoint is loaded, follow the schedule of the flags, not of the checkpoint."""

    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        on="--use-checkpoint-opt_param-scheduler",
        aliases=["--use-checkpoint-opt-param-scheduler"],
        only_with=("load", "finetune!=True"),
    )
    """When a checkpoint is loaded, follow the schedule of the checkpoint, not of the flags."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        yield from too_small(self, ("lr_decay_iters", "lr_decay_samples"), 1)
        counts = ("lr_warmup_iters", "lr_warmup_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        yield from too_small(self, (*counts, "lr_warmup_init", "start_weight_decay", "end_weight_decay"), 0)
        yield from self._warmup_problems()
        if self.weight_decay_incr_style != "constant":
            yield from self._weight_decay_problems()
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield (
                "{override_opt_param_scheduler} and {use_checkpoint_opt_param_scheduler} contradict each other; "
                "give one"
            )

    def _warmup_problems(self) -> Iterator[str]:
        lengths = [field for field in ("lr_warmup_iters", "lr_warmup_samples") if getattr(self, field)]
        if self.lr_warmup_fraction is not None:
            if not 0.0 <= self.lr_warmup_fraction < 1.0:
                yield "{lr_warmup_fraction} must be at least 0 and less than 1"
            lengths.insert(0, "lr_warmup_fraction")
        if len(lengths) > 1:
            names = " and ".join(f"{{{field}}}" for field in lengths)
            yield f"{names} say how long to warm up in {len(lengths)} ways; give one"

    def _weight_decay_problems(self) -> Iterator[str]:
        start, end = self.start_weight_decay, self.end_weight_decay
        for field in ("start_weight_decay", "end_weight_decay"):
            if getattr(self, field) is None:
                yield f"{{weight_decay_incr_style}} needs {{{field}:name}}"
        if start is not None and end is not None and end < start:
            yield "{end_weight_decay} is less than {start_weight_decay}; weight decay can only grow"
