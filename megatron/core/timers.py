"""Named timers with levels. Starting and stopping a timer does not wait for the device; reading it does.

On a GPU a timer records events in the current stream, and measures the time of the device between them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from megatron.core.communication.collectives import barrier as barrier_of
from megatron.core.communication.collectives import numbers_of_ranks
from megatron.core.exceptions import UserError

LogOption = Literal["max", "minmax", "all"]


class ScalarWriter(Protocol):
    """The interface of a TensorBoard writer that `Timers.write` uses."""

    def add_scalar(self, tag: str, value: float, iteration: int) -> object:
        """Writes one number."""


class Timer:
    """Sums the time between starts and stops."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._running = False
        self._begun: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    @property
    def running(self) -> bool:
        """Whether the timer has started and not stopped."""
        return self._running

    def start(self, barrier: bool = False) -> None:
        """Starts a span; with `barrier`, after a barrier over all ranks. Raises RuntimeError if the timer runs
        already."""
        if self._running:
            raise RuntimeError(f"timer {self.name!r} is running already")
        if barrier:
            barrier_of()
        self._begun, self._running = moment(), True

    def stop(self, barrier: bool = False) -> None:
        """Ends the span; with `barrier`, after a barrier over all ranks. Raises RuntimeError if the timer does not
        run."""
        if not self._running:
            raise RuntimeError(f"timer {self.name!r} is not running")
        if barrier:
            barrier_of()
        self._spans.append((self._begun, moment()))
        self._running = False

    def reset(self) -> None:
        """Drops all spans."""
        self._spans.clear()
        self._seconds = 0.0

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Returns the seconds of all spans since the last reset, including a running one. Waits for the last event of a
        GPU."""
        running = self._running
        if running:
            self.stop(barrier)
        self._seconds += sum(seconds_between(*span) for span in self._spans)
        self._spans.clear()
        total = self._seconds
        if reset:
            self.reset()
        if running:
            self.start(barrier)
        return total


def moment() -> Any:
    """Returns the time now: an event that is recorded in the current stream, or seconds without a GPU."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Returns the seconds from one `moment` to another. Waits for the event of the later one."""
    if isinstance(end, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0


class _Silent(Timer):
    """A timer above the log level: does nothing."""

    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...


@contextlib.contextmanager
def timed(timers: Callable[..., Any] | None, name: str, log_level: int, barrier: bool = False) -> Iterator[None]:
    """Runs the timer `timers(name, log_level=log_level)` inside the context, which may end with an exception. `timers`
    is a script's own function or a `Timers` object, which may also mark this part in a profile; None: nothing is
    timed."""
    if timers is None:
        yield
        return
    timer = timers(name, log_level=log_level)
    mark = timers.mark if isinstance(timers, Timers) else None
    with contextlib.nullcontext() if mark is None else mark(name):
        timer.start(barrier=barrier)
        try:
            yield
        finally:
            timer.stop()


class Timers:
    """Timers by name: `timers("forward-backward", log_level=1).start()`.

    A timer whose level is above `log_level` does nothing. `log_option` selects which times of the ranks `log` shows:
    the largest (max), the smallest and the largest (minmax), or all. `mark(name)` returns a context that marks a part
    of a step in a profile, at every level; None: no marks.
    """

    MAX_LOG_LEVEL = 2

    def __init__(
        self,
        log_level: int,
        log_option: LogOption,
        mark: Callable[[str], contextlib.AbstractContextManager[object]] | None = None,
    ) -> None:
        if not 0 <= log_level <= self.MAX_LOG_LEVEL:
            raise UserError(f"--timing-log-level {log_level}: 0, 1 or 2")
        if log_option not in ("max", "minmax", "all"):
            raise UserError(f"--timing-log-option {log_option!r}: max, minmax or all")
        self.log_level = log_level
        self._log_option = log_option
        self.mark = mark
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}
        self._silent = _Silent("above the log level")

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Returns the timer of this name. The first call creates it with the given level (default: the highest). Raises
        UserError for another level than before."""
        if name not in self._levels:
            level = self.MAX_LOG_LEVEL if log_level is None else log_level
            if not 0 <= level <= self.MAX_LOG_LEVEL:
                raise UserError(f"timer {name!r} has level {level}: 0, 1 or 2")
            self._levels[name] = level
            if level <= self.log_level:
                self._timers[name] = Timer(name)
        elif log_level is not None and log_level != self._levels[name]:
            raise UserError(f"timer {name!r} has level {self._levels[name]}, not {log_level}")
        return self._timers.get(name, self._silent)

    def get_all_timers_string(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str | None:
        """Returns one line per timer with the times of all ranks in ms / `normalizer`; None if no timer ran. All ranks
        must call this."""
        return self.text_of(self.seconds_of_ranks(names, reset, barrier), normalizer)

    def text_of(self, times: Mapping[str, Sequence[float]], normalizer: float = 1.0) -> str | None:
        """Returns one line per timer, from the result of `seconds_of_ranks`; None if no timer ran."""
        lines = []
        for name, seconds in times.items():
            ran = [1000.0 * s / normalizer for s in seconds if s > 0.0]
            if ran:
                lines.append(f"    {name + ':':.<40} {self._shown(ran)}")
        if not lines:
            return None
        titles = {
            "max": "max time across ranks (ms):",
            "minmax": "(min, max) time across ranks (ms):",
            "all": "times across ranks (ms):",
        }
        return "\n".join([titles[self._log_option], *lines])

    def log(
        self,
        names: Sequence[str] | None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Prints `get_all_timers_string` on one rank (default: the last). All ranks must call this."""
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        world, here = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if text is not None and here == (world - 1 if rank is None else rank):
            print(text, flush=True)

    def write(
        self,
        names: Sequence[str],
        writer: ScalarWriter | None,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Writes the largest time of each timer, in seconds / `normalizer`, to a writer. All ranks must call this;
        ranks without a writer pass None."""
        for name, seconds in self.seconds_of_ranks(names, reset, barrier).items():
            if writer is not None:
                writer.add_scalar(f"{name}-time", max(seconds) / normalizer, iteration)

    def _shown(self, milliseconds: list[float]) -> str:
        if self._log_option == "max":
            return f"{max(milliseconds):.2f}"
        if self._log_option == "minmax":
            return f"({min(milliseconds):.2f}, {max(milliseconds):.2f})"
        return " ".join(f"{value:.2f}" for value in milliseconds)

    def seconds_of_ranks(
        self, names: Sequence[str] | None = None, reset: bool = True, barrier: bool = False
    ) -> dict[str, list[float]]:
        """Returns the seconds of each timer on every rank, 0 where it did not run. All ranks must call this, with the
        same names; without names, all ranks must have the same timers."""
        chosen = list(self._timers if names is None else names)
        if barrier:
            barrier_of()
        mine = [self._timers[name].elapsed(reset=reset) if name in self._timers else 0.0 for name in chosen]
        table = numbers_of_ranks(mine) if chosen else []
        return {name: [row[i] for row in table] for i, name in enumerate(chosen)}
