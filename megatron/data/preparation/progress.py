"""Shows the progress: a progress bar on a terminal, plain lines in a file."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Counts:
    """Bytes read, documents and tokens so far."""

    bytes: int
    documents: int
    tokens: int

    @classmethod
    def of_workers(cls, numbers: Sequence[int]) -> "Counts":
        """Returns the sums over workers. `numbers` has bytes, documents and tokens of the first worker, then the
        next."""
        return cls(sum(numbers[0::3]), sum(numbers[1::3]), sum(numbers[2::3]))


class ProgressDisplay:
    """Shows counts, rate and time left. A context manager."""

    def __init__(self, console: Console, total_bytes: int, log_interval: int) -> None:
        self._console = console
        self._total = max(1, total_bytes)
        self._log_interval = log_interval
        self._began = self._last_line = time.monotonic()
        self._documents_at_last_line = 0
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=self._console, transient=True)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, counts: Counts) -> None:
        """Shows new counts, or prints a line if one is due."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=counts.bytes, description=self._describe(counts, now))
            return
        due = now - self._last_line >= _SECONDS_BETWEEN_LINES
        if due and counts.documents - self._documents_at_last_line >= self._log_interval:
            self._last_line, self._documents_at_last_line = now, counts.documents
            self._console.print(self._describe(counts, now), highlight=False, soft_wrap=True)

    def _describe(self, counts: Counts, now: float) -> str:
        seconds = max(now - self._began, 1e-9)
        rate = counts.bytes / seconds
        left = (self._total - counts.bytes) / rate if rate else float("inf")
        return (
            f"{counts.documents:,} documents | {counts.tokens / 1e6:,.1f}M tokens | "
            f"{counts.bytes / 1e6:,.1f} of {self._total / 1e6:,.1f} MB ({100 * counts.bytes / self._total:.1f}%) | "
            f"{rate / 1e6:.1f} MB/s | {_duration(left)} left"
        )


def _duration(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(int(max(seconds, 0) + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
