"""Speed of a run: a clock that stops during evaluation and saving, and rates."""

import contextlib
import time
from collections.abc import Callable, Iterator

from megatron.training.log.records import Speed


class StepClock:
    """Wall time of training; stopped during evaluation and saving."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = now()
        self._stopped_at: float | None = None

    def seconds(self) -> float:
        """Returns the time since the clock was created or restarted."""
        return (self._now() if self._stopped_at is None else self._stopped_at) - self._started

    def restart(self) -> None:
        """Starts again from zero."""
        self._started = self._now() if self._stopped_at is None else self._stopped_at

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock inside the context. Pauses do not nest."""
        assert self._stopped_at is None, "the clock is stopped already"
        self._stopped_at = self._now()
        try:
            yield
        finally:
            self._started += self._now() - self._stopped_at
            self._stopped_at = None


def speed(
    seconds: float,
    iterations: int,
    *,
    tokens: int | None = None,
    flops: float | None = None,
    world_size: int = 1,
    peak_tflops: float | None = None,
) -> Speed:
    """Returns the rates of `iterations` steps in which all ranks together processed `tokens` and computed `flops`.

    The utilisation is relative to `peak_tflops` of one device; None without a known peak.
    """
    tflops = None if flops is None or seconds <= 0.0 else flops / (seconds * 1e12 * world_size)
    return Speed(
        seconds_per_iteration=seconds / max(iterations, 1),
        tokens_per_second=None if tokens is None or seconds <= 0.0 else tokens / seconds,
        tflops_per_device=tflops,
        mfu=None if tflops is None or peak_tflops is None else tflops / peak_tflops,
    )
