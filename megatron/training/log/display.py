"""Console output: log lines, and on a terminal a progress bar below them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron.training.log.console_line import (
    format_line,
    format_short_line,
    format_short_validation,
    format_task,
    format_validation,
)
from megatron.training.log.records import LogRecord, LogWriter, TaskRecord, ValidationRecord


@dataclass(frozen=True)
class LineStyle:
    """The functions that make the lines of --log-style."""

    line: Callable[[LogRecord], str]
    validation: Callable[[ValidationRecord], str]


MEGATRON_LM = LineStyle(format_line, format_validation)
SHORT = LineStyle(format_short_line, format_short_validation)


class PlainDisplay(LogWriter):
    """Prints log lines for files and pipes, each with one write."""

    def __init__(self, stream: IO[str] | None = None, style: LineStyle = MEGATRON_LM) -> None:
        self._stream = stream
        self._style = style

    def line(self, record: LogRecord) -> None:
        """Prints the log line."""
        self._print(self._style.line(record))

    def validation(self, record: ValidationRecord) -> None:
        """Prints the result of an evaluation."""
        self._print(self._style.validation(record))

    def task(self, record: TaskRecord) -> None:
        """Prints the scores of an evaluation task."""
        self._print(format_task(record))

    def _print(self, text: str) -> None:
        print(text, file=self._stream or sys.stdout, flush=True)


class BarDisplay(PlainDisplay):
    """Prints the log lines above a progress bar that stays at the bottom of the terminal.

    The bar is redrawn at log lines, and in between at most `refreshes_per_second` times per second. Log lines are never
    wrapped or coloured, so that a recorded terminal can be searched.
    """

    def __init__(
        self,
        train_iters: int,
        *,
        iteration: int = 0,
        console: Console | None = None,
        refreshes_per_second: float = 4.0,
        style: LineStyle = MEGATRON_LM,
    ) -> None:
        super().__init__(style=style)
        self._period, self._drawn = 1.0 / refreshes_per_second, monotonic()
        columns = (
            BarColumn(None),
            TextColumn("{task.completed:,} of {task.total:,} iterations,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._bar = Progress(*columns, console=console, expand=True, auto_refresh=False)
        self._task = self._bar.add_task("", total=max(train_iters, 1), completed=iteration)
        self._bar.start()

    def went_back(self, iteration: int) -> None:
        """Moves the bar back to this iteration."""
        self._bar.update(self._task, completed=iteration)

    def progress(self, iteration: int) -> None:
        """Redraws the bar if the last drawing is old enough."""
        due = monotonic() - self._drawn >= self._period
        self._drawn = monotonic() if due else self._drawn
        self._bar.update(self._task, completed=iteration, refresh=due)

    def close(self) -> None:
        """Draws the bar for the last time."""
        self._bar.stop()

    def _print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def make_display(
    train_iters: int, *, iteration: int = 0, console: Console | None = None, style: LineStyle = MEGATRON_LM
) -> LogWriter:
    """Returns a progress bar for a terminal that can move its cursor, else plain lines."""
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return BarDisplay(train_iters, iteration=iteration, console=console, style=style)
    return PlainDisplay(console.file, style)
