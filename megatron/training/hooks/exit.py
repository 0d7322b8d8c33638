"""Early exit of all ranks after the same step.

There are two kinds of reasons. Every rank knows by itself when --exit-interval is reached. A signal,
--exit-duration-in-mins, a non-finite loss, a loss spike or a hook that asks is noticed by one rank first. For these,
each step starts one all-reduce of seven integers on a separate gloo group, and reads the result of the all-reduce that
the step before started. So nothing waits for the device, and a host waits for other hosts only if one of them is a
whole step behind. A reason that appears during step k ends the run after step k + 1; if a checkpoint is due
(`resolve_pending`), after step k.
"""

import enum
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.core.communication.collectives import Pending, start_all_reduce
from megatron.core.utils.torch_groups import create_group
from megatron.training.launch.signals import SignalWatch


class ExitReason(enum.Enum):
    """Why a run exits before its last iteration."""

    INTERVAL = "interval"
    DURATION = "duration"
    SIGNAL = "signal"
    NON_FINITE = "non-finite"
    LOSS_SPIKE = "loss-spike"
    SKIPPED_UPDATES = "skipped-updates"
    ASKED = "asked"


@dataclass(frozen=True)
class ExitDecision:
    """The decision to exit early; the same on every rank."""

    reason: ExitReason
    message: str
    exit_code: int
    """0 if the user asked for the exit, by a flag or a signal, so that a launcher does not count it as a failure."""
    save: bool
    """Whether to save a checkpoint; False after a non-finite loss, a loss spike, or too many skipped updates."""


class ExitAgreement:
    """Lets all ranks decide together, once per step, whether to exit.

    Every rank calls `after_step` after each step and `poll` at the same places in between (evaluation). All ranks
    get a decision from the same call.

    Args:
        group: a gloo group of all ranks (`agreement_group`); None: a single process, which decides at once.
        rank: global rank of this process, for the message.
        signals: the watch that remembers signals, or None.
        exit_interval: exit after an iteration that this number divides.
        exit_duration_in_mins: exit once this many minutes have passed since `started`.
        started: `time.monotonic()` at the start of the program; None: now.
        non_finite: returns whether this rank knows of a non-finite loss or gradient that must stop the run.
        loss_spike: returns whether this rank knows of a loss spike that ends the run or sends it back.
        skipped_updates: returns whether this rank knows that too many updates in a row were skipped.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        rank: int = 0,
        signals: SignalWatch | None = None,
        exit_interval: int | None = None,
        exit_duration_in_mins: float | None = None,
        started: float | None = None,
        non_finite: Callable[[], bool] = lambda: False,
        loss_spike: Callable[[], bool] = lambda: False,
        skipped_updates: Callable[[], bool] = lambda: False,
    ) -> None:
        self.group = group
        self.rank = rank
        self.signals = signals
        self.exit_interval = exit_interval
        self.exit_duration_in_mins = exit_duration_in_mins
        self.started = time.monotonic() if started is None else started
        self.non_finite = non_finite
        self.loss_spike = loss_spike
        self.skipped_updates = skipped_updates
        self.rounds = 0
        """All-reduces started so far."""
        self._asked = False
        self._decision: ExitDecision | None = None
        self._round: Pending | None = None

    def after_step(self, iteration: int) -> ExitDecision | None:
        """Checks --exit-interval, then does what `poll` does. `iteration` is the number of iterations done."""
        decision = self.poll()
        if decision is None and self.exit_interval and iteration % self.exit_interval == 0:
            self._decision = decision = ExitDecision(
                ExitReason.INTERVAL, f"exiting program at iteration {iteration}", exit_code=0, save=True
            )
        return decision

    def poll(self) -> ExitDecision | None:
        """Returns the decision of the previous round and starts the next round. A decision is final: later calls return
        it again."""
        if self._decision is None:
            self._decision = self._decide(self._finish_round() if self.group is not None else self._local_flags())
            if self._decision is None and self.group is not None:
                self._start_round()
        return self._decision

    def resolve_pending(self) -> ExitDecision | None:
        """Returns the decision from everything that any rank knows now. Waits for all ranks; every rank calls it at the
        same place.

        Call it before a save and after the last step: without it, other ranks learn one step later what one rank
        noticed in this step. A non-finite loss, a loss spike or too many skipped updates replace an earlier decision,
        because their state must not be saved.
        """
        if self.group is None:
            flags: torch.Tensor | None = self._local_flags()
        else:
            self._finish_round()
            self._start_round()
            flags = self._finish_round()
        found = self._decide(flags)
        if self._decision is None or (found is not None and not found.save):
            self._decision = found
        return self._decision

    def ask(self) -> None:
        """Asks for an exit with a checkpoint, for a hook. One rank that asks is enough."""
        self._asked = True

    def withdraw(self) -> None:
        """Forgets the decision, because the run continues nevertheless. All ranks call it at the same place."""
        self._finish_round()
        self._decision = None

    def close(self) -> None:
        """Waits for a round that has not finished. Every rank calls it once, before the groups are destroyed."""
        self._finish_round()

    def _local_flags(self) -> torch.Tensor:
        """Returns int32 [non-finite, loss spike, too many skips, signal number, 1 + rank with the signal, time is up,
        a hook asks], to be reduced by maximum."""
        number = (self.signals.received if self.signals is not None else None) or 0
        limit = self.exit_duration_in_mins
        late = limit is not None and (time.monotonic() - self.started) / 60.0 > limit
        holder = self.rank + 1 if number else 0
        trouble = [self.non_finite(), self.loss_spike(), self.skipped_updates()]
        return torch.tensor([*trouble, number, holder, late, self._asked], dtype=torch.int32)

    def _start_round(self) -> None:
        self._round = start_all_reduce(self._local_flags(), self.group, dist.ReduceOp.MAX)
        self.rounds += 1

    def _finish_round(self) -> torch.Tensor | None:
        """Returns the reduced flags of the running round; None before the first round."""
        if self._round is None:
            return None
        pending, self._round = self._round, None
        try:
            return pending.wait()
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank}: another rank is gone (seen between two steps): {error}") from error

    def _decide(self, flags: torch.Tensor | None) -> ExitDecision | None:
        if flags is None:
            return None
        non_finite, loss_spike, skips, number, holder, late, asked = (int(flag) for flag in flags)
        if non_finite:
            return ExitDecision(ExitReason.NON_FINITE, "exiting program after a non-finite loss or gradient", 1, False)
        if loss_spike:
            return ExitDecision(ExitReason.LOSS_SPIKE, "exiting program after a loss spike", 1, False)
        if skips:
            message = "exiting program after too many skipped updates in a row (--max-consecutive-skips)"
            return ExitDecision(ExitReason.SKIPPED_UPDATES, message, 1, False)
        if number:
            name = signal.Signals(number).name
            return ExitDecision(
                ExitReason.SIGNAL, f"exiting program after receiving {name} on rank {holder - 1}", 0, True
            )
        if late:
            return ExitDecision(
                ExitReason.DURATION, f"exiting program after {self.exit_duration_in_mins:g} minutes", 0, True
            )
        if asked:
            return ExitDecision(ExitReason.ASKED, "training ends early because a hook asks for it", 0, True)
        return None


def agreement_group(timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Returns a gloo group of all ranks for `ExitAgreement`, None in a single process. Collective. Without a `timeout`
    it has torch's default, half an hour."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return create_group(backend="gloo", timeout=timeout)
