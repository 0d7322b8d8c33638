"""What happens when something goes wrong."""

import signal
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_yet

_ALWAYS = "SIGTERM is always handled: ranks agree on a step, save and exit"


@dataclass(kw_only=True, frozen=True)
class ResilienceConfig:
    """Non-finite numbers, signals, and checks of the machine."""

    check_for_nan_in_loss_and_grad: bool = flag(True, off="--no-check-for-nan-in-loss-and-grad")
    """Look for non-finite losses and gradients, and name rank, iteration, micro-batch and sample ids of each."""

    nonfinite_action: Literal["stop", "skip"] = flag("stop", only_with="check_for_nan_in_loss_and_grad")
    """What to do about a non-finite loss or gradient: stop the run, or skip the update and go on. (An overflow under
    the dynamic loss scale of --fp16 always skips.)"""

    exit_signal_handler: bool = flag(False, no_effect=_ALWAYS)
    """Save and exit on --exit-signal."""

    exit_signal: signal.Signals = signal.SIGTERM
    """Signal upon which ranks agree on a step, save and exit."""

    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, no_effect="not yet: replicas are not compared while training runs"
    )
    """Steps between two comparisons of the weights of data parallel replicas."""

    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = flag(
        "validate_results", no_effect="steps are not run twice; non-finite values are reported with their samples"
    )
    """Run suspicious steps again, to tell broken hardware from bad data."""

    error_injection_rate: int = not_yet(0)
    """Plant an error once in so many steps, to test the reaction."""

    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = flag(
        "transient_error", only_with="error_injection_rate"
    )
    """With --error-injection-rate: the kind of error."""
