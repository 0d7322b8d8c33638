"""RerunStateMachine: checks results of a step, and computes a step again to distinguish transient from permanent
faults.

A loss function passes its results to `validate_result`. Outside a training loop of this package, a rejected result
raises RuntimeError (or warns) at once. Inside the loop, the machine keeps the verdicts on the device until the
micro-batches of the step are done. Then the ranks agree whether any result was rejected. In the mode `validate_results`
they compute the step again, before its gradients are used:

| second result | diagnosis | what follows |
|---|---|---|
| accepted | a transient fault of the hardware, or of a kernel | the run continues with the second gradients |
| rejected, and equal to the first | the data, the model, or a permanent fault | an error if `fatal`, else a warning |
| rejected, and another value | a fault, or a step that is not deterministic | an error if `fatal`, else a warning |

The loop calls `step` and decides whether the micro-batches can be drawn a second time. A `RerunErrorInjector` makes up
rejected results, to test the reaction to them.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication.collectives import numbers_of_ranks
from megatron.core.exceptions import UserError
from megatron.core.health.rerun_checks import Check, RerunErrorInjector, diagnose, value_text
from megatron.core.health.rerun_checks import RerunDiagnostic as RerunDiagnostic
from megatron.core.utils.warn import warn_on_first_rank

Result = TypeVar("Result")


class RerunMode(enum.Enum):
    """How the machine treats the results of a step."""

    DISABLED = "disabled"
    """A rejected result is an error or a warning."""
    VALIDATE_RESULTS = "validate_results"
    """A step with a rejected result is computed again."""
    REPORT_DETERMINISM_STATS = "report_stats"
    """Every step is computed twice, and the differences between its results are reported at the end."""


@dataclass
class _Magnitudes:
    """The values that `is_unexpectedly_large` has seen under one context."""

    seen: int = 0
    largest: float = 0.0


@dataclass
class _Stats:
    """Differences between two computations of one result, over steps."""

    count: int = 0
    different: int = 0
    largest: float = 0.0


@dataclass
class _Step:
    """The checks of the current step."""

    checks: list[Check] = field(default_factory=list)
    first: Sequence[Check] | None = None
    """The checks of the first computation, in the second one."""


class RerunStateMachine:
    """Collects the results of a step and reacts to rejected results; see the module's docstring.

    Args:
        leaves_non_finite: a rejected result that is not finite is reported, but is not an error, because the training
        loop of this package has its own reaction to it (--nonfinite-action).
    """

    def __init__(
        self,
        mode: RerunMode = RerunMode.DISABLED,
        injector: RerunErrorInjector | None = None,
        *,
        leaves_non_finite: bool = False,
    ) -> None:
        self.mode = mode
        self.injector = injector if injector is not None and injector.rate > 0 else None
        """Makes up rejected results; None: all are real."""
        self.leaves_non_finite = leaves_non_finite
        self.checks_results: bool | None = None
        """Whether any rank passes results to `validate_result`; None before the first step."""
        self._step: _Step | None = None
        self._magnitudes: dict[str, _Magnitudes] = {}
        self._previous_loss: float | None = None
        self._stats: dict[str, _Stats] = {}

    # For loss functions ----------------------------------------------------------------------------------------------

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Checks a result: a number or tensor that `rejection_func` accepts or rejects.

        `comparison_func(first, second)` returns the relative difference of two results; they count as equal if it is at
        most `tolerance`. Raises RuntimeError for a rejected result if `fatal`: at once outside a loop of this package,
        inside it after the step.
        """
        value = result.detach().clone() if isinstance(result, Tensor) else torch.tensor(float(result))
        rejected = rejection_func(result)
        rejected = rejected.any() if isinstance(rejected, Tensor) else torch.tensor(bool(rejected))
        check = self._with_errors(Check(value, rejected, message, fatal, tolerance, comparison_func))
        if self._step is not None:
            self._step.checks.append(check)
        elif bool(check.rejected):
            _react([f"{_where()}: {check.message} ({value_text(check.result)})"], fatal)

    def _with_errors(self, check: Check) -> Check:
        """Returns the check as it is, or with an injected error. Only results of training steps get one."""
        if self.injector is None or self._step is None:
            return check
        first, number = self._step.first, len(self._step.checks)
        if first is None:
            return self.injector.inject(check, again=False) if self.injector.is_due() else check
        injected = number < len(first) and first[number].injected
        return self.injector.inject(check, again=True) if injected else check

    def is_unexpectedly_large(
        self, result: Tensor, threshold: float, context: str, num_samples: int = 100, resample: bool = False
    ) -> bool:
        """Returns whether the magnitude of a value is at least `threshold` times the largest of the first `num_samples`
        values of this context. False for these values themselves, and for NaN and infinity. `resample` starts over."""
        known = self._magnitudes.setdefault(context, _Magnitudes())
        if resample:
            known.seen, known.largest = 0, 0.0
        value = abs(float(result))
        if not math.isfinite(value):
            return False
        if known.seen < num_samples:
            known.seen, known.largest = known.seen + 1, max(known.largest, value)
            return False
        return value >= known.largest * threshold

    def is_spiky_loss(self, loss_tensor: Tensor, threshold: float) -> bool:
        """Returns whether a loss differs from the previous one by at least `threshold`, relative to that one."""
        loss, before = float(loss_tensor), self._previous_loss
        self._previous_loss = loss
        return before is not None and bool(before) and abs(loss - before) / abs(before) >= threshold

    # For the training loop -------------------------------------------------------------------------------------------

    def step(self, compute: Callable[[], Result], start_again: Callable[[], bool] | None = None) -> Result:
        """Runs `compute`, the micro-batches of a training step, and checks its results. All ranks call it.

        `start_again` prepares a second computation: it discards gradients and rewinds the data, and returns False if
        that is impossible. Waits for the device if any rank validates results. Raises RuntimeError for a rejected
        result, on all ranks.
        """
        first, found = self._record(compute)
        if self.checks_results is None:
            self.checks_results = _any_rank(bool(first))
        if not self.checks_results:
            return found
        rejected = _any_rank(_any_rejected(first))
        asked = rejected if self.mode is RerunMode.VALIDATE_RESULTS else self.mode is not RerunMode.DISABLED
        if not asked or start_again is None or not start_again():
            self._conclude(first, [], rejected)
            return found
        second, found = self._record(compute, first)
        if self.mode is RerunMode.REPORT_DETERMINISM_STATS:
            self._count(first, second)
        self._conclude(first, second, rejected)
        return found

    def validate_losses(self, reports: Sequence[Mapping[str, Tensor]]) -> None:
        """With an error injector: if the loss function has validated nothing, validates the losses that the step
        reports, so that the injector has results to reject."""
        if self.injector is None or self._step is None or self._step.checks:
            return
        for name, value in ((name, value) for report in reports for name, value in report.items()):
            self.validate_result(value, lambda loss: ~loss.isfinite(), f"{name} is rejected")

    def _record(
        self, compute: Callable[[], Result], first: Sequence[Check] | None = None
    ) -> tuple[list[Check], Result]:
        self._step = _Step(first=first)
        try:
            found = compute()
            return self._step.checks, found
        finally:
            self._step = None

    def _conclude(self, first: Sequence[Check], second: Sequence[Check], rejected: bool) -> None:
        """Reports this rank's rejected results, and ends the run on all ranks if one of them is fatal."""
        if not rejected:
            return
        fatal, lines = False, []
        for number, check in enumerate(first):
            if not bool(check.rejected):
                continue
            line = f"{_where()}: {check.message} ({value_text(check.result)})"
            lasting = not second or bool(second[number].rejected)
            if second:
                line += f"; computed again: {diagnose(check, second[number])[1]}"
            left = self.leaves_non_finite and not bool(check.result.isfinite().all())
            fatal = fatal or (check.fatal and lasting and not left)
            lines.append(line)
        for line in lines:
            print(line, flush=True)
        if _any_rank(fatal):
            raise RuntimeError("; ".join(lines) or "another rank rejected a result of this step; its lines say which")

    # Statistics ------------------------------------------------------------------------------------------------------

    def _count(self, first: Sequence[Check], second: Sequence[Check]) -> None:
        for one, two in zip(first, second, strict=True):
            stats, difference = self._stats.setdefault(one.message, _Stats()), one.difference(two)
            stats.count += 1
            stats.different += difference > 0
            stats.largest = max(stats.largest, difference)

    def report(self) -> list[str]:
        """Returns a line for each kind of result about the differences between two computations, in the mode
        `report_stats`."""
        return [
            f"{_where()}: {name!r}: {stats.different} of {stats.count} results changed when computed again, by up to "
            f"{stats.largest:.3e} of their size"
            for name, stats in self._stats.items()
        ]


def _react(lines: Sequence[str], fatal: bool) -> None:
    if fatal:
        raise RuntimeError("; ".join(lines))
    for line in lines:
        print(line, flush=True)


def _where() -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.cuda.current_device() if torch.cuda.is_available() else "CPU"
    return f"rank {rank} (device {device})"


def _any_rejected(checks: Sequence[Check]) -> bool:
    """Returns whether any result was rejected. Waits for the device once."""
    if not checks:
        return False
    device = checks[0].rejected.device
    return bool(torch.stack([check.rejected.to(device) for check in checks]).any())


def _any_rank(flag: bool) -> bool:
    """Returns whether the flag is True on any rank of the world."""
    return any(found for (found,) in numbers_of_ranks([flag]))


# ---------------------------------------------------------------------------------------------------------------------
# The machine of this process, for user scripts


class _Process:
    machine: RerunStateMachine | None = None


def initialize_rerun_state_machine(
    mode: RerunMode | str = RerunMode.DISABLED,
    error_injector: RerunErrorInjector | None = None,
    *,
    leaves_non_finite: bool = False,
    **unused: object,
) -> RerunStateMachine:
    """Makes the machine of this process and returns it. `leaves_non_finite`, our own keyword, is that of
    `RerunStateMachine`. Raises UserError for an unknown mode."""
    try:
        _Process.machine = RerunStateMachine(RerunMode(mode), error_injector, leaves_non_finite=leaves_non_finite)
    except ValueError:
        modes = ", ".join(mode.value for mode in RerunMode)
        raise UserError(f"rerun_mode {mode}: unknown; choose from {modes}") from None
    for name in unused:
        warn_on_first_rank(f"initialize_rerun_state_machine({name}=...) has no effect")
    return _Process.machine


def get_rerun_state_machine() -> RerunStateMachine:
    """Returns the machine of this process; makes one, which is disabled, if there is none."""
    return _Process.machine or initialize_rerun_state_machine()


def destroy_rerun_state_machine() -> None:
    """Forgets the machine of this process."""
    _Process.machine = None
