"""Non-finite numbers, signals and faults."""

import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, too_small


@dataclass(kw_only=True, frozen=True)
class ResilienceConfig:
    """Reaction to non-finite numbers and to signals, and checks of the hardware."""

    check_for_nan_in_loss_and_grad: bool = flag(True, off="--no-check-for-nan-in-loss-and-grad")
    """Look for non-finite losses and gradients, and report rank, iteration, micro-batch and sample ids of each."""

    nonfinite_action: Literal["stop", "skip"] = flag("stop", only_with="check_for_nan_in_loss_and_grad")
    """What to do after a non-finite loss or gradient: stop the run, or skip the update and continue. (An overflow under
    the dynamic loss scale of --fp16 always skips.)"""

    nonfinite_dump_dir: str | None = flag(None, only_with="check_for_nan_in_loss_and_grad")
    """Folder for the step that ends a run because of a non-finite loss or gradient: batch, state before the step, and
    the first non-finite value of each rank. `tools/replay.py` computes the step again. Default: `nonfinite` in the
    folder of --save."""

    loss_spike_action: Literal["skip", "rewind"] | None = None
    """What to do after a loss that is far above those before it: skip leaves out its update and continues; rewind goes
    back to the newest checkpoint from before --loss-spike-rewind-window and leaves out the data of that window. All
    ranks decide alike, and checkpoints keep the state of the decision. Without the flag, losses are not judged."""

    loss_spike_z_score: float = flag(6.0, only_with="loss_spike_action")
    """With --loss-spike-action: a loss is a spike if it is more than this many standard deviations above the mean of
    --loss-spike-history."""

    loss_spike_history: int = flag(100, only_with="loss_spike_action")
    """With --loss-spike-action: number of losses with which each loss is compared: the newest ones without spikes.
    Until there are that many, no loss is a spike."""

    loss_spike_rewind_window: int = flag(100, only_with="loss_spike_action=rewind")
    """With --loss-spike-action rewind: number of iterations, up to that of the spike, whose data is read but not
    trained on after the run has gone back."""

    loss_spike_limit: int = flag(10, only_with="loss_spike_action")
    """With --loss-spike-action: number of spikes in a row (skip), or of rewinds in all (rewind), after which the run
    ends."""

    exit_signal_handler: bool = False
    """Save and exit after --exit-signal. `pretrain` does so without the flag too. A script with its own loop needs the
    flag, and asks `get_signal_handler()` whether the signal has come."""

    exit_signal: signal.Signals = signal.SIGTERM
    """Signal after which all ranks save at the same step and exit."""

    hang_timeout_seconds: int | None = None
    """Seconds without progress of any rank, while some wait, after which a run of several processes ends and names the
    rank that the others wait for. Default: nine tenths of --distributed-timeout-minutes."""

    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Steps between two comparisons of the weights of data parallel replicas by checksums. The run ends if they differ,
    which only broken hardware or a script's own code can do. Each comparison waits for the device."""

    gpu_sniff_test_interval: int | None = None
    """Steps between two tests of the hardware: matrix products, all-to-all among all ranks, messages between
    neighbours. The ranks that are more than one standard deviation from the mean are printed. Each test waits for the
    device."""

    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "validate_results"
    """What to do about a result that a script's loss function hands to the rerun state machine and rejects: end or warn
    (disabled), or compute the step again first, to tell broken hardware from bad data (validate_results).
    report_stats computes every step twice and says at the end how much results changed."""

    check_for_spiky_loss: bool = False
    """Print a line if a loss is at least 10 times the largest of the first 100 iterations. Scripts of Megatron-LM also
    look at each micro-batch."""

    error_injection_rate: int = 0
    """Reject one result in this many, at random, although nothing is wrong with it, to test the reaction to it (see
    --rerun-mode). Results are those that a script's loss function validates; without any, the losses of micro-batches.
    0: never."""

    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = flag(
        "transient_error", only_with="error_injection_rate"
    )
    """With --error-injection-rate: what is rejected. correct_result: the true value, each time it is computed;
    transient_error: a wrong value, and when it is computed again the true one is accepted; persistent_error: the same
    wrong value each time."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        yield from too_small(self, ("error_injection_rate",), 0)
        sizes = ("loss_spike_rewind_window", "loss_spike_limit")
        yield from too_small(self, sizes, 1)
        yield from too_small(self, ("loss_spike_history",), 2)
        if not 0.0 < self.loss_spike_z_score < math.inf:
            yield "{loss_spike_z_score} must be above 0"
        intervals = ("check_weight_hash_across_dp_replicas_interval", "gpu_sniff_test_interval")
        yield from too_small(self, ("hang_timeout_seconds", *intervals), 1)
        if self.exit_signal in (signal.SIGKILL, signal.SIGSTOP):
            yield "{exit_signal} cannot be caught by any program; SIGTERM or SIGUSR1 can"
