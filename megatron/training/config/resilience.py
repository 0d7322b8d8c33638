"""Non-finite numbers, signals, and faults that are injected on purpose."""

import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag, too_small

FAULTS = ("exception", "hang", "lock_gil", "crash", "segfault", "sigint", "sigterm", "sigkill", "sigstop")
"""Faults that can be injected."""


@dataclass(kw_only=True, frozen=True)
class ResilienceConfig:
    """Reaction to non-finite numbers and to signals, and checks of the hardware."""

    check_for_nan_in_loss_and_grad: bool = flag(
        True, off="--no-check-for-nan-in-loss-and-grad", off_help="Do not look for non-finite losses and gradients."
    )
    """Look for non-finite losses and gradients, and report rank, iteration, micro-batch and sample ids of each."""

    nonfinite_action: Literal["stop", "skip"] = flag("stop", only_with="check_for_nan_in_loss_and_grad")
    """What to do after a non-finite loss or gradient: stop the run, or skip the update and continue. (An overflow under
    the dynamic loss scale of --fp16 always skips.)"""

    max_consecutive_skips: int = 10
    """End the run, with exit code 1 and without a checkpoint, after this many steps in a row whose update was skipped
    because of a non-finite loss or gradient. Steps that lower the loss scale of --fp16 do not count."""

    nonfinite_dump_dir: str | None = flag(None, only_with=("check_for_nan_in_loss_and_grad", "nonfinite_action=stop"))
    """Folder for the step that ends a run because of a non-finite loss or gradient: batch, state before the step, and
    the first non-finite value of each rank. `tools/replay.py` computes the step again. Default: `nonfinite` in the
    folder of --save."""

    loss_spike_action: Literal["skip", "rewind"] | None = None
    """What to do after a loss spike, which is a loss far above the previous ones. skip: leave out the update of this
    step and continue. rewind: go back to the newest checkpoint from before --loss-spike-rewind-window and leave out the
    data of that window. All ranks make the same decision, and checkpoints keep its state. Without the flag, loss spikes
    are not detected."""

    loss_spike_z_score: float = flag(6.0, only_with="loss_spike_action")
    """With --loss-spike-action: a loss is a spike if it is more than this many standard deviations above the mean of
    --loss-spike-history."""

    loss_spike_history: int = flag(100, only_with="loss_spike_action")
    """With --loss-spike-action: each loss is compared with this many previous losses. Earlier spikes are not among
    them. No loss is a spike until there are that many."""

    loss_spike_rewind_window: int = flag(100, only_with="loss_spike_action=rewind")
    """With --loss-spike-action rewind: number of iterations to leave out after going back. The last of them is the
    iteration of the spike. Their data is read but not trained on."""

    loss_spike_limit: int = flag(10, only_with="loss_spike_action")
    """With --loss-spike-action: end the run after this many spikes in a row (skip) or this many rewinds in total
    (rewind)."""

    exit_signal_handler: bool = False
    """Save and exit after --exit-signal. `pretrain` does so without the flag too. A script with its own loop needs the
    flag, and asks `get_signal_handler()` whether the signal has arrived."""

    exit_signal: signal.Signals = signal.SIGTERM
    """Signal after which all ranks save at the same step and exit."""

    preemption_notice: Literal["aws", "gcp", "azure"] | None = None
    """Ask this cloud's metadata service whether a spot machine is about to be taken away. After a notice all ranks save
    after the same step and exit, as after --exit-signal."""

    hang_timeout_seconds: int | None = None
    """End a run of several processes if some ranks wait and no rank makes progress for this many seconds. The message
    names the rank that the others wait for. Default: nine tenths of --distributed-timeout-minutes."""

    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Steps between two comparisons of the weights of data parallel replicas by checksums. The run ends if they differ,
    which only broken hardware or a script's own code can do. Each comparison waits for the device."""

    gpu_sniff_test_interval: int | None = None
    """Steps between two tests of the hardware: matrix products, all-to-all among all ranks, messages between
    neighbours. The ranks that are more than one standard deviation from the mean are printed. Each test waits for the
    device."""

    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "validate_results"
    """What to do if a script's loss function rejects a result through the rerun state machine. disabled: end the run or
    warn. validate_results: compute the step again first, to tell broken hardware from bad data. report_stats: compute
    every step twice and report at the end how much the results differ."""

    check_for_spiky_loss: bool = False
    """Print a line if a loss is at least 10 times the largest of the first 100 iterations. Scripts of Megatron-LM also
    look at each micro-batch."""

    error_injection_rate: int = 0
    """Reject one correct result in this many, at random, to test --rerun-mode. Results are the values that a script's
    loss function validates. If it validates none, they are the losses of micro-batches. 0: never."""

    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = flag(
        "transient_error", only_with="error_injection_rate"
    )
    """With --error-injection-rate: which value is rejected. correct_result: the true value, each time it is computed.
    transient_error: a wrong value at first; the true value is accepted when the step is computed again.
    persistent_error: the same wrong value each time."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        yield from too_small(self, ("error_injection_rate",), 0)
        sizes = ("max_consecutive_skips", "loss_spike_rewind_window", "loss_spike_limit")
        yield from too_small(self, sizes, 1)
        yield from too_small(self, ("loss_spike_history",), 2)
        if not 0.0 < self.loss_spike_z_score < math.inf:
            yield "{loss_spike_z_score} must be above 0"
        intervals = ("check_weight_hash_across_dp_replicas_interval", "gpu_sniff_test_interval")
        yield from too_small(self, ("hang_timeout_seconds", *intervals), 1)
        if self.exit_signal in (signal.SIGKILL, signal.SIGSTOP):
            yield "{exit_signal} cannot be caught by any program; SIGTERM or SIGUSR1 can"


@dataclass(kw_only=True, frozen=True)
class FaultInjectorConfig:
    """Faults on purpose, to test how a cluster and its restarts react to them."""

    fault_injector_fault_types: str | None = None
    """Inject one of these faults, separated by commas. exception: the training step raises; hang: training stops and
    the process lives; lock_gil: all threads of the process stop; crash (abort), segfault, sigint, sigterm, sigkill,
    sigstop."""

    fault_injector_fault_probabilities: str | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: weights of the faults, separated by commas; equal when not given."""

    fault_injector_ranks: str | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: ranks that get the fault, separated by commas."""

    fault_injector_num_ranks: int | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: number of ranks that get the fault, chosen at random. Default: 1, without
    --fault-injector-ranks."""

    fault_injector_fault_delay: float | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: seconds until the fault."""

    fault_injector_mtti_seconds: float | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: mean time until the fault in seconds. The time is drawn from an exponential
    distribution."""

    fault_injector_offset_seconds: float | None = flag(None, only_with="fault_injector_mtti_seconds")
    """With --fault-injector-mtti-seconds: seconds that are added to the drawn time."""

    fault_injector_delay_start_iteration: int | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: iteration after which the time until the fault begins. Default: the start of
    training."""

    fault_injector_seed: int | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: seed for drawing the ranks, the fault and the time. Default: --seed."""

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults from which one is drawn; empty without the flag."""
        return tuple(
            word.strip().lower() for word in (self.fault_injector_fault_types or "").split(",") if word.strip()
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each fault. Raises ValueError for a word that is no number."""
        given = self.fault_injector_fault_probabilities
        return tuple(map(float, given.split(","))) if given is not None else (1.0,) * len(self.faults)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are given. Raises ValueError for a word that is no whole number."""
        given = self.fault_injector_ranks
        return tuple(map(int, given.split(","))) if given is not None else ()

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        yield from too_small(self, ("fault_injector_num_ranks",), 1)
        seconds = ("fault_injector_fault_delay", "fault_injector_mtti_seconds", "fault_injector_offset_seconds")
        yield from too_small(self, (*seconds, "fault_injector_delay_start_iteration"), 0)
        if self.fault_injector_fault_types is None:
            return
        if unknown := [fault for fault in self.faults if fault not in FAULTS]:
            yield f"{{fault_injector_fault_types}}: {unknown[0]} is none of {', '.join(FAULTS)}"
        if (self.fault_injector_fault_delay is None) == (self.fault_injector_mtti_seconds is None):
            yield (
                "{fault_injector_fault_types}: give {fault_injector_fault_delay:name} or "
                "{fault_injector_mtti_seconds:name}"
            )
        if self.fault_injector_ranks is not None and self.fault_injector_num_ranks is not None:
            yield "{fault_injector_ranks} and {fault_injector_num_ranks} both say which ranks; give one"
        try:
            weights = self.weights
        except ValueError:
            yield "{fault_injector_fault_probabilities}: not numbers separated by commas"
        else:
            if len(weights) != len(self.faults) or min(weights, default=1.0) < 0 or not sum(weights) > 0:
                yield (
                    "{fault_injector_fault_probabilities}: give one weight for each of {fault_injector_fault_types}, "
                    "not negative and not all 0"
                )
        try:
            if min(self.ranks, default=0) < 0:
                yield "{fault_injector_ranks}: ranks count from 0"
        except ValueError:
            yield "{fault_injector_ranks}: not whole numbers separated by commas"
