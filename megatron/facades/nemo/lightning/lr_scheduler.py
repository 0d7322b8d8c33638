"""Schedules of the learning rate under NeMo's names. Their formulas are Megatron-LM's, as --lr-decay-style says."""

from collections.abc import Sequence

from megatron.facades.nemo.lightning.arguments import Argument, ArgumentValues
from megatron.facades.nemo.lightning.flags import Flags

_EVERY_STEP = "the schedule advances with every step"
_MORE: Sequence[Argument] = (
    Argument("interval", "step", refusal=f"leave it out; {_EVERY_STEP}"),
    Argument("frequency", 1, refusal=f"leave it out; {_EVERY_STEP}"),
    Argument("monitor", "val_loss", note=_EVERY_STEP),
)
_MAX_STEPS = Argument("max_steps")
_MIN_LR = Argument("min_lr", 0.0)


class LRSchedulerModule(ArgumentValues):
    """A schedule. `max_steps` is by default that of the trainer."""

    style = "constant"
    """The value of --lr-decay-style."""
    max_steps: int | None
    min_lr: float = 0.0

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings of the schedule."""
        super().give_flags(flags)
        flags.give("lr_decay_style", self.style)
        flags.give("min_lr", float(self.min_lr))
        last = self.max_steps if self.max_steps is not None else flags.values.get("train_iters")
        if isinstance(last, int):
            flags.give("lr_decay_iters", last - int(getattr(self, "constant_steps", 0) or 0))
        ratio = getattr(self, "warmup_ratio", None)
        if ratio is not None:
            flags.give("lr_warmup_fraction", float(ratio))
        else:
            flags.give("lr_warmup_iters", int(getattr(self, "warmup_steps", 0) or 0))


class CosineAnnealingScheduler(LRSchedulerModule):
    """Warm-up, then a cosine down to `min_lr`, which the last `constant_steps` keep."""

    style = "cosine"
    table = (
        _MAX_STEPS,
        Argument("warmup_steps", 750),
        Argument("constant_steps", 0),
        Argument("min_lr", 6e-05),
        *_MORE,
    )


class WarmupAnnealingScheduler(LRSchedulerModule):
    """Warm-up, then a straight line down to `min_lr`."""

    style = "linear"
    table = (Argument("warmup_steps", 750), Argument("warmup_ratio"), _MAX_STEPS, _MIN_LR, *_MORE)


class WarmupPolicyScheduler(LRSchedulerModule):
    """Warm-up, then a constant rate."""

    table = (Argument("warmup_steps", 750), Argument("warmup_ratio"), _MAX_STEPS, _MIN_LR, *_MORE)


class InverseSquareRootAnnealingScheduler(LRSchedulerModule):
    """The inverse square root of the step."""

    style = "inverse-square-root"
    table = (_MAX_STEPS, _MIN_LR, *_MORE)


REFUSED = (
    "WarmupHoldPolicyScheduler",
    "SquareAnnealingScheduler",
    "SquareRootAnnealingScheduler",
    "NoamAnnealingScheduler",
    "NoamHoldAnnealingScheduler",
    "T5InverseSquareRootAnnealingScheduler",
    "PolynomialDecayAnnealingScheduler",
    "PolynomialHoldDecayAnnealingScheduler",
    "WarmupHoldAnnealScheduler",
)
"""Schedules of NeMo without a formula here. Constructing one raises UserError, which names those that exist."""


class _RefusedScheduler(LRSchedulerModule):
    """A schedule that a run refuses, with the names of those that exist."""

    takes_more = True

    def give_flags(self, flags: Flags) -> None:
        """Adds the problem."""
        flags.refuse(
            f"nl.lr_scheduler.{type(self).__name__}",
            "give CosineAnnealingScheduler, WarmupAnnealingScheduler, WarmupPolicyScheduler or "
            "InverseSquareRootAnnealingScheduler; MegatronStrategy(flags=[...]) takes --lr-decay-style WSD too",
        )


globals().update({name: type(name, (_RefusedScheduler,), {"__doc__": "Refused."}) for name in REFUSED})
