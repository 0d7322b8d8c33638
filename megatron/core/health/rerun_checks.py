"""One check of a result: its verdict, injected errors, and the diagnosis from a second computation."""

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.exceptions import UserError


class RerunDiagnostic(enum.Enum):
    """Diagnosis of a rejected result after a second computation."""

    TRANSIENT_ERROR = "transient error"
    REPRODUCIBLE_RESULT = "reproducible result"
    CHANGING_RESULT = "changing result"


class RerunErrorInjector:
    """Rejects a correct result of a training step at random, once in `error_injection_rate` validations (0: never).
    `error_injection_type` chooses the injected value:

    - correct_result: the true value, also when it is computed again;
    - transient_error: a wrong value; the second computation gives the true value, which is accepted;
    - persistent_error: a wrong value; the second computation gives the same wrong value.

    Gradients stay correct. Each rank draws independently. Raises UserError for an unknown type.
    """

    TYPES = ("correct_result", "transient_error", "persistent_error")

    def __init__(
        self, error_injection_rate: int = 0, error_injection_type: str = "transient_error", seed: int = 1234
    ) -> None:
        if error_injection_type not in self.TYPES:
            raise UserError(f"error_injection_type {error_injection_type}: choose from {', '.join(self.TYPES)}")
        self.rate, self.kind = error_injection_rate, error_injection_type
        self._random = random.Random(f"{seed} {dist.get_rank() if dist.is_initialized() else 0}")

    def is_due(self) -> bool:
        """Returns whether the result of this validation is to be rejected."""
        return self.rate > 0 and self._random.random() * self.rate < 1.0

    def inject(self, check: "Check", again: bool) -> "Check":
        """Returns the check with an error in it. `again`: the result is computed for the second time."""
        if again and self.kind == "transient_error":
            return check
        wrong = check.result if self.kind == "correct_result" else check.result + 1
        message = f"{check.message}, injected as {self.kind}"
        return replace(check, result=wrong, rejected=torch.ones_like(check.rejected), message=message, injected=True)


@dataclass
class Check:
    """One call of `validate_result` in a step."""

    result: Tensor
    rejected: Tensor
    message: str
    fatal: bool
    tolerance: float
    comparison_func: Callable[[object, object], float] | None
    injected: bool = False

    def difference(self, again: "Check") -> float:
        """Returns how much the second result differs, relative to the first; 0 if both are NaN."""
        first, second = self.result.double(), again.result.double()
        if self.comparison_func is not None:
            return float(self.comparison_func(self.result, again.result))
        if torch.equal(first, second) or bool((first.isnan() & second.isnan()).all()):
            return 0.0
        scale = first.abs().max().item()
        gap = (first - second).abs().max().item()
        return gap / scale if scale else gap


def diagnose(first: Check, second: Check) -> tuple[RerunDiagnostic, str]:
    """Returns the diagnosis of a rejected result after a second computation, and a sentence about it."""
    value, difference = value_text(second.result), first.difference(second)
    if not bool(second.rejected):
        return RerunDiagnostic.TRANSIENT_ERROR, (
            f"{value} is accepted: a transient fault of this device; the second result is used"
        )
    if difference <= first.tolerance:
        return RerunDiagnostic.REPRODUCIBLE_RESULT, (
            "the same again: the data, the model or a permanent fault of this device"
        )
    return RerunDiagnostic.CHANGING_RESULT, (
        f"{value}, which is rejected too and differs by {difference:.1e}: a fault of this device, or an algorithm that "
        "is not deterministic"
    )


def value_text(value: Tensor) -> str:
    """Returns a value for a message, or the number of values."""
    return f"value {value.item():.6g}" if value.numel() == 1 else f"{value.numel()} values"
