"""StragglerDetector: measures how long this rank takes for forward steps and for fetching batches, and compares ranks.

    detector = StragglerDetector()          # the one detector of the process
    with detector(bdata=True):
        batch = next(data_iterator)
    with detector:
        output = model(batch)
    ...
    line = detector.report(total_flops=0.0, log_interval=100)

It measures nothing until `configure(..., enabled=True)`. Forward steps are measured by CUDA events where there is a
GPU, so that nothing waits for the device before the report.
"""

import statistics
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from megatron.core.communication.collectives import numbers_of_ranks
from megatron.core.exceptions import UserError
from megatron.core.timers import moment, seconds_between


@dataclass
class _Measured:
    """What was measured since the last report."""

    forward: list[tuple[Any, Any]] = field(default_factory=list)
    """Start and end of each forward step: CUDA events, or seconds."""
    batch_seconds: float = 0.0
    batches: int = 0


class StragglerDetector:
    """The detector of this process: every call of the class returns the same object."""

    _instance: "StragglerDetector | None" = None

    def __new__(cls) -> "StragglerDetector":
        """Returns the detector of this process."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance._clear()
        return cls._instance

    def _clear(self) -> None:
        self.rank, self.world, self.mmcnt = 0, 1, 1
        self._enabled = False
        self._measures_batch = False
        self._open: list[tuple[bool, Any]] = []
        self._measured = _Measured()

    def configure(
        self,
        world: int,
        rank: int,
        mmcnt: int = 1,
        amp: float = 3.0,
        port: int = 65535,
        prefill: int = 1024,
        enabled: bool = False,
    ) -> None:
        """Sets this rank's number, the number of fastest and slowest ranks in a report (`mmcnt`), and whether to
        measure. `amp`, `port` and `prefill` have no effect; only `enabled` switches the detector on or off."""
        if mmcnt < 1:
            raise UserError(f"straggler_minmax_count {mmcnt} must be at least 1")
        self._clear()
        self.world, self.rank, self.mmcnt, self._enabled = world, rank, min(mmcnt, world), enabled

    @property
    def enabled(self) -> bool:
        """Whether it measures."""
        return self._enabled

    @property
    def configured(self) -> bool:
        """Whether it measures, or would if it were enabled."""
        return True

    def reset(self) -> None:
        """Discards all measurements."""
        self._measured = _Measured()

    def __call__(self, bdata: bool = False) -> "StragglerDetector":
        """Chooses what the next `with` measures: the fetch of a batch (`bdata`), or a forward step."""
        self._measures_batch = bdata
        return self

    def __enter__(self) -> "StragglerDetector":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begins a measurement."""
        fetches, self._measures_batch = self._measures_batch, False
        if self._enabled:
            self._open.append((fetches, time.perf_counter() if fetches else moment()))

    def stop(self) -> None:
        """Ends the measurement that began last. A forward step inside another one counts as a part of it."""
        if not self._open:
            return
        fetches, begun = self._open.pop()
        if fetches:
            self._measured.batch_seconds += time.perf_counter() - begun
            self._measured.batches += 1
        elif all(other for other, _ in self._open):
            self._measured.forward.append((begun, moment()))

    def elapsed(self) -> tuple[float, float]:
        """Returns the mean seconds of a forward step and of a fetch since the last report; 0 without a measurement.
        Waits for the device."""
        forward = [seconds_between(begun, ended) for begun, ended in self._measured.forward]
        fetch = self._measured.batch_seconds / max(self._measured.batches, 1)
        return (sum(forward) / len(forward) if forward else 0.0), fetch

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> str | None:
        """Returns which ranks were fastest and slowest since the last report; None if the detector is off, and on all
        ranks but the first. All ranks call it. `total_flops`: floating point operations of a rank in `log_interval`
        steps, 0: unknown."""
        if not self._enabled:
            return None
        of_ranks = numbers_of_ranks(self.elapsed())
        self.reset()
        if self.rank != 0:
            return None
        parts = [
            text
            for name, index in (("forward step", 0), ("fetch of a batch", 1))
            if (text := self._compare(name, [times[index] for times in of_ranks]))
        ]
        if total_flops and log_interval:
            parts.append(f"{total_flops / log_interval:.3e} floating point operations a step and rank")
        return "stragglers: " + ("; ".join(parts) or "nothing was measured")

    def _compare(self, what: str, seconds: list[float]) -> str:
        """Returns the fastest and slowest ranks and the median; empty if nothing was measured."""
        order = sorted(range(len(seconds)), key=lambda rank: seconds[rank])
        if not seconds[order[-1]]:
            return ""

        def named(ranks: list[int]) -> str:
            return ", ".join(f"rank {rank} {seconds[rank] * 1e3:.2f} ms" for rank in ranks)

        median = statistics.median(seconds)
        slowest = named(order[::-1][: self.mmcnt])
        return f"{what}: fastest {named(order[: self.mmcnt])}, slowest {slowest}, median {median * 1e3:.2f} ms"
