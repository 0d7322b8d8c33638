"""Learning rate and weight decay as pure functions of the consumed samples, and the scheduler that applies them.

The functions take a float64 scalar tensor, so that the device can advance the schedule without the host: a step whose
update was not applied does not count.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.exceptions import UserError

logger = logging.getLogger(__name__)

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_STYLES = ("constant", "linear", "cosine")
STATE_NAMES = (
    "max_lr",
    "lr_warmup_steps",
    "num_steps",
    "lr_decay_style",
    "lr_decay_steps",
    "min_lr",
    "start_wd",
    "end_wd",
    "wd_incr_style",
    "wd_incr_steps",
)
"""Names of the scheduler's state in checkpoints, equal to those of Megatron-LM."""


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up from init_lr to max_lr, then a decay to min_lr. Steps are samples; see `learning_rate`."""

    init_lr: float
    max_lr: float
    min_lr: float
    warmup_steps: float
    decay_steps: int
    decay_style: str
    wsd_decay_steps: int | None = None
    wsd_decay_style: str | None = None
    warmup_log_steps: float | None = None
    """Number of updates of a warm-up that rises with their logarithm; None: it rises linearly."""


def learning_rate(num_steps: Tensor, schedule: LearningRateSchedule) -> Tensor:
    """Returns the learning rate after `num_steps` samples: a float64 scalar from a float64 scalar.

    Warm-up, up to and including its last step: linear, or with N = `warmup_log_steps` updates from init_lr to max_lr by
    log(1 + N n / warmup) / log(N), at most 1 (the logarithmic warm-up of DeepSpeed's WarmupLR). Then, with r =
    (n - warmup) / (decay - warmup) in [0, 1], min_lr + c (max_lr - min_lr) where c is 1 - r (linear) or (1 + cos(pi
    r)) / 2 (cosine); max_lr sqrt(warmup / n) (inverse-square-root); max_lr until the last wsd_decay_steps (WSD). After
    the decay: min_lr.
    """
    s = schedule
    if s.decay_style == "constant":
        rate = torch.full_like(num_steps, s.max_lr)
    elif s.decay_style == "inverse-square-root":
        rate = s.max_lr * math.sqrt(max(s.warmup_steps, 1)) / num_steps.clamp(min=1).sqrt()
        rate = rate.clamp(min=s.min_lr)
    else:
        rate = s.min_lr + _decay_coefficient(num_steps, s) * (s.max_lr - s.min_lr)
    if s.decay_style != "constant":
        rate = torch.where(num_steps > s.decay_steps, s.min_lr, rate)
    if s.warmup_steps > 0:
        warming = s.init_lr + (s.max_lr - s.init_lr) * _warmup_coefficient(num_steps / s.warmup_steps, s)
        rate = torch.where(num_steps <= s.warmup_steps, warming, rate)
    return rate


def _warmup_coefficient(done: Tensor, s: LearningRateSchedule) -> Tensor:
    """Returns 0 at the start of the warm-up (done = 0) and 1 at its end."""
    if s.warmup_log_steps is None:
        return done
    updates = max(2.0, s.warmup_log_steps)
    return (torch.log1p(done * updates) / math.log(updates)).clamp(max=1.0)


def _decay_coefficient(num_steps: Tensor, s: LearningRateSchedule) -> Tensor:
    if s.decay_style == "WSD":
        assert s.wsd_decay_steps is not None
        begin = s.decay_steps - s.wsd_decay_steps
        done = ((num_steps - begin) / s.wsd_decay_steps).clamp(min=0.0)
        return _wsd_coefficient(done, s.wsd_decay_style)
    done = (num_steps - s.warmup_steps) / (s.decay_steps - s.warmup_steps)
    return _cosine(done) if s.decay_style == "cosine" else 1.0 - done


def _wsd_coefficient(done: Tensor, style: str | None) -> Tensor:
    """Returns 1 at the start of the annealing (done = 0) and 0 at its end."""
    if style == "cosine":
        return _cosine(done)
    if style == "exponential":
        return 2.0 * torch.pow(0.5, done) - 1.0
    if style == "minus_sqrt":
        return 1.0 - done.sqrt()
    return 1.0 - done


def _cosine(done: Tensor) -> Tensor:
    return 0.5 * (torch.cos(math.pi * done) + 1.0)


def weight_decay(num_steps: Tensor, start: float, end: float, steps: int, style: str) -> Tensor:
    """Returns the weight decay after `num_steps` samples: from `start` to `end` over `steps`, linear or half a
    cosine."""
    done = (num_steps / steps).clamp(max=1.0)
    grown = done if style == "linear" else _cosine(1.0 - done)
    return start + grown * (end - start)


class OptimizerParamScheduler:
    """Writes `lr` and `weight_decay` into an optimizer's parameter groups as samples are consumed.

    A group's own `max_lr`, `min_lr`, `start_wd`, `end_wd` replace those given here; `lr_mult` and `wd_mult` multiply.
    If a group's `lr` is a tensor, it is updated in place on its device, without waiting. Steps are samples: call
    `step(increment=global batch size)` after a successful update, or `advance_on_device` after any.

    `decoupled_lr` and `decoupled_min_lr`, which Megatron-LM does not have here, are used only by
    `decoupled_learning_rate`. The groups have these values in their own settings.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: float,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
        decoupled_lr: float | None = None,
        decoupled_min_lr: float | None = None,
        lr_warmup_log_steps: float | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.init_lr, self.max_lr, self.min_lr = init_lr, max_lr, min_lr
        self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style = lr_warmup_steps, lr_decay_steps, lr_decay_style
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.wsd_decay_steps, self.lr_wsd_decay_style = wsd_decay_steps, lr_wsd_decay_style
        self.decoupled_lr, self.decoupled_min_lr = decoupled_lr, decoupled_min_lr
        self.lr_warmup_log_steps = lr_warmup_log_steps
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self._refuse_problems()
        self._count = torch.zeros((), dtype=torch.float64, device=getattr(optimizer, "device", "cpu"))
        self.learning_rate: Tensor
        """Current rate of groups without their own settings: a float64 scalar tensor, a new one at each step."""
        self.decoupled_learning_rate: Tensor | None = None
        """Current rate of embedding and output layer if `decoupled_lr` is given, even on ranks that hold neither."""
        self._apply()

    def _refuse_problems(self) -> None:
        problems = self._problems()
        if problems:
            raise UserError("; ".join(problems))

    def _problems(self) -> list[str]:
        rules = (
            (0.0 <= self.min_lr <= self.max_lr, f"min_lr {self.min_lr} must be from 0 to max_lr {self.max_lr}"),
            (self.init_lr <= self.max_lr, f"lr_warmup_init {self.init_lr} is above max_lr {self.max_lr}"),
            (self.lr_decay_steps > 0, f"lr_decay_steps {self.lr_decay_steps} must be positive"),
            (
                self.lr_warmup_steps < self.lr_decay_steps,
                f"the warm-up ({self.lr_warmup_steps} samples) must end before the decay ({self.lr_decay_steps})",
            ),
            (
                self.lr_decay_style in DECAY_STYLES,
                f"lr_decay_style {self.lr_decay_style!r}: one of {', '.join(DECAY_STYLES)}",
            ),
            (
                self.lr_decay_style != "WSD" or (self.wsd_decay_steps or 0) > 0,
                "lr_decay_style WSD needs wsd_decay_steps: --lr-wsd-decay-iters or --lr-wsd-decay-samples",
            ),
            (
                self.lr_decay_style != "WSD" or self.lr_wsd_decay_style in WSD_STYLES,
                f"lr_wsd_decay_style {self.lr_wsd_decay_style!r}: one of {', '.join(WSD_STYLES)}",
            ),
            (0.0 <= self.start_wd <= self.end_wd, f"weight decay must grow: from {self.start_wd} to {self.end_wd}"),
            (self.wd_incr_style in WD_STYLES, f"wd_incr_style {self.wd_incr_style!r}: one of {', '.join(WD_STYLES)}"),
            (
                self.wd_incr_style != "constant" or self.start_wd == self.end_wd,
                f"weight decay grows from {self.start_wd} to {self.end_wd}: wd_incr_style linear or cosine",
            ),
            (
                self.wd_incr_style == "constant" or self.wd_incr_steps > 0,
                f"wd_incr_steps {self.wd_incr_steps} must be positive",
            ),
        )
        return [problem for holds, problem in rules if not holds]

    # The values ------------------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Number of samples counted so far. Waits for the device."""
        return int(self._count.item())

    def rate(self, num_steps: Tensor, schedule: LearningRateSchedule) -> Tensor:
        """Returns the learning rate after `num_steps` samples (float64 scalars), without waiting for the device.

        A subclass with another formula overrides this.
        """
        return learning_rate(num_steps, schedule)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Returns the current learning rate of a group, without its `lr_mult`. Waits for the device."""
        return self.rate(self._count, self._schedule_of(param_group)).item()

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Returns the current weight decay of a group, without its `wd_mult`. Waits for the device."""
        return float(self._wd_of(param_group or {}))

    def _setting(self, group: dict[str, Any], name: str) -> Any:
        own = group.get(name)
        return getattr(self, name) if own is None else own

    def _schedule_of(self, group: dict[str, object]) -> LearningRateSchedule:
        return LearningRateSchedule(
            self.init_lr,
            self._setting(group, "max_lr"),
            self._setting(group, "min_lr"),
            self.lr_warmup_steps,
            self.lr_decay_steps,
            self.lr_decay_style,
            self.wsd_decay_steps,
            self.lr_wsd_decay_style,
            self.lr_warmup_log_steps,
        )

    def _wd_of(self, group: dict[str, Any]) -> float | Tensor:
        start, end = self._setting(group, "start_wd"), self._setting(group, "end_wd")
        if self.wd_incr_style == "constant":
            return end
        return weight_decay(self._count, start, end, self.wd_incr_steps, self.wd_incr_style)

    # The steps -------------------------------------------------------------------------------------------------------

    def step(self, increment: int) -> None:
        """Advances the schedule by `increment` samples."""
        self._count += increment
        self._apply()

    def advance_on_device(self, update_applied: Tensor, increment: int) -> None:
        """Advances the schedule by `increment` samples if the bool scalar `update_applied` is True. Does not wait for
        the device."""
        self._count += update_applied * increment
        self._apply()

    @torch.no_grad()
    def _apply(self) -> None:
        own = self._schedule_of({})
        rates = {own: self.rate(self._count, own)}
        self.learning_rate = rates[own]
        if self.decoupled_lr is not None:
            decoupled = self._schedule_of({"max_lr": self.decoupled_lr, "min_lr": self.decoupled_min_lr})
            self.decoupled_learning_rate = rates[decoupled] = self.rate(self._count, decoupled)
        for group in self.optimizer.param_groups:
            schedule = self._schedule_of(group)
            if schedule not in rates:
                rates[schedule] = self.rate(self._count, schedule)
            rate = rates[schedule] * group.get("lr_mult", 1.0)
            decay = self._wd_of(group) * group.get("wd_mult", 1.0)
            if isinstance(group.get("lr"), Tensor):
                group["lr"].copy_(rate)
                group["weight_decay"] = decay
            else:
                group["lr"], group["weight_decay"] = rate.item(), float(decay)

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the schedule and the number of samples, as JSON types. Waits for the device."""
        return {name: getattr(self, name) for name in STATE_NAMES}

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        spelling: Callable[[str], str] = str,
        log: Callable[[str], object] = logger.warning,
    ) -> None:
        """Continues a schedule from `state_dict`.

        For settings that differ from this run's, `override_opt_param_scheduler` keeps this run's, otherwise
        `use_checkpoint_opt_param_scheduler` takes the checkpoint's; `log` is called with each line. Without
        either, raises UserError naming all differences. Raises it too if the checkpoint's settings need others that
        this run lacks. `spelling` returns the name of a setting in messages, such as its flag.
        """
        differing = [name for name in STATE_NAMES if self._differs(name, state_dict)]
        refused = []
        for name in differing:
            ours, saved = getattr(self, name), state_dict[name]
            if self.override_opt_param_scheduler:
                log(f"schedule: {spelling(name)} is {ours}, overriding the checkpoint's {saved}")
            elif self.use_checkpoint_opt_param_scheduler:
                log(f"schedule: {spelling(name)} is the checkpoint's {saved}, not {ours} as given")
                setattr(self, name, saved)
            else:
                refused.append(f"{spelling(name)} is {ours} in this run and {saved} in the checkpoint")
        if refused:
            raise UserError(
                f"{'; '.join(refused)}: give the same, or --override-opt-param-scheduler to use this run's values, or "
                "--use-checkpoint-opt-param-scheduler to use the checkpoint's"
            )
        self._refuse_problems()
        self._count.fill_(state_dict["num_steps"])
        self._apply()

    def _differs(self, name: str, state_dict: dict[str, Any]) -> bool:
        """Whether a setting differs and has an effect: wd_incr_steps has none if weight decay is constant."""
        styles = {self.wd_incr_style, state_dict.get("wd_incr_style", self.wd_incr_style)}
        if name == "num_steps" or name not in state_dict or (name == "wd_incr_steps" and styles == {"constant"}):
            return False
        return state_dict[name] != getattr(self, name)
