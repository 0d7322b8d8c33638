"""Console output: Megatron-LM's log lines, and on a terminal a live panel below them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron.training.log.console_line import (
    format_duration,
    format_line,
    format_short_line,
    format_short_validation,
    format_task,
    format_validation,
)
from megatron.training.log.records import Event, LogRecord, LogWriter, Speed, StepRecord, TaskRecord, ValidationRecord


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


@dataclass
class _State:
    """The values that the panel shows."""

    iteration: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    loss_name: str = "loss"
    record: LogRecord | None = None
    validation: ValidationRecord | None = None
    checkpoint: int | None = None
    skipped: int = 0


class LiveDisplay(LogWriter):
    """Prints the log lines above a panel that stays at the bottom of the terminal.

    The panel shows progress, recent losses, learning rate, speed, remaining time, the last validation and the last
    checkpoint; in the short style only progress. It is redrawn at log lines, and in between at most
    `refreshes_per_second` times per second, from values on the host. Log lines are never wrapped or coloured, so that a
    recorded terminal can be searched.
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
        self._train_iters = train_iters
        self._style = style
        self._state = _State(iteration=iteration)
        self._console = console or Console()
        self._period = 1.0 / refreshes_per_second
        self._drawn = monotonic()
        self._line_at = monotonic()
        self._live = Live(self._panel(), console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def steps(self, steps: Sequence[StepRecord], speed: Speed) -> None:
        """Adds the losses to the curve."""
        for step in steps:
            self._state.skipped += not step.applied
            for name, loss in list(step.losses.items())[:1]:
                self._state.loss_name = name
                self._state.losses = [*self._state.losses[-511:], (step.iteration, loss)]

    def line(self, record: LogRecord) -> None:
        """Prints the log line and redraws the panel."""
        self._state.record, self._line_at = record, monotonic()
        self._state.iteration = max(self._state.iteration, record.iteration)
        self._print(self._style.line(record))

    def validation(self, record: ValidationRecord) -> None:
        """Prints the result of an evaluation and redraws the panel."""
        self._state.validation = record
        self._print(self._style.validation(record))

    def task(self, record: TaskRecord) -> None:
        """Prints the scores of an evaluation task."""
        self._print(format_task(record))

    def event(self, event: Event) -> None:
        """Shows the iteration of the last checkpoint."""
        if event.name == "save":
            self._state.checkpoint = event.iteration
            self._draw()

    def went_back(self, iteration: int) -> None:
        """Forgets the losses beyond this iteration."""
        self._state.iteration = iteration
        self._state.losses = [(number, loss) for number, loss in self._state.losses if number <= iteration]

    def progress(self, iteration: int) -> None:
        """Redraws the panel if the last drawing is old enough."""
        self._state.iteration = iteration
        if monotonic() - self._drawn >= self._period:
            self._draw()

    def close(self) -> None:
        """Draws the panel for the last time."""
        self._live.update(self._panel())
        self._live.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        self._draw()

    def _draw(self) -> None:
        self._drawn = monotonic()
        self._live.update(self._panel(), refresh=True)

    def _panel(self) -> RenderableType:
        state, total = self._state, self._train_iters
        progress = Table.grid(padding=(0, 1), expand=True)
        progress.add_column(ratio=1)
        progress.add_column(justify="right", no_wrap=True)
        progress.add_row(
            ProgressBar(total=max(total, 1), completed=state.iteration), f"{state.iteration:,} of {total:,} iterations"
        )
        if self._style is SHORT:
            return progress
        table = Table.grid(padding=(0, 2))
        for name, value in self._facts():
            table.add_row(Text(name, style="dim"), Text(value))
        return Panel(Group(progress, table), title="training", title_align="left", border_style="dim")

    def _facts(self) -> list[tuple[str, str]]:
        state = self._state
        facts = []
        if state.losses:
            values = [loss for _, loss in state.losses]
            facts.append((state.loss_name, f"{values[-1]:.4f}  {sparkline(values, 40)}"))
        if state.record is not None:
            facts += self._facts_of_line(state.record)
        if state.validation is not None:
            losses = ", ".join(f"{name} {loss:.4f}" for name, loss in state.validation.losses.items())
            facts.append((state.validation.split, f"{losses} at iteration {state.validation.iteration:,}"))
        if state.checkpoint is not None:
            facts.append(("checkpoint", f"iteration {state.checkpoint:,}"))
        if state.skipped:
            facts.append(("skipped", f"{state.skipped:,} updates"))
        return facts

    def _facts_of_line(self, record: LogRecord) -> list[tuple[str, str]]:
        facts = []
        if record.learning_rate is not None:
            decoupled = record.decoupled_learning_rate
            more = "" if decoupled is None else f", decoupled {decoupled:.3e}"
            facts.append(("learning rate", f"{record.learning_rate:.3e}{more}"))
        speed = record.speed
        rate = f"{record.elapsed_ms_per_iteration:,.1f} ms per iteration"
        if speed is not None and speed.tokens_per_second is not None:
            rate += f", {speed.tokens_per_second:,.0f} tokens/s"
        if speed is not None and speed.tflops_per_device is not None:
            rate += f", {speed.tflops_per_device:.1f} TFLOP/s a device"
        if speed is not None and speed.mfu is not None:
            rate += f", MFU {speed.mfu:.1%}"
        facts.append(("speed", rate))
        if record.tokens:
            facts.append(("tokens", f"{record.tokens:,}"))
        left = (self._train_iters - record.iteration) * record.elapsed_ms_per_iteration / 1000.0
        left = max(0.0, left - (monotonic() - self._line_at))
        facts.append(("time left", format_duration(left)))
        return facts


def make_display(
    train_iters: int, *, iteration: int = 0, console: Console | None = None, style: LineStyle = MEGATRON_LM
) -> LogWriter:
    """Returns a live panel for a terminal that can move its cursor, else plain lines."""
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(train_iters, iteration=iteration, console=console, style=style)
    return PlainDisplay(console.file, style)


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns the last `width` values as bars, scaled from the lowest to the highest of them; a cross for a value that
    is not finite."""
    shown = list(values[-width:])
    finite = [value for value in shown if abs(value) < float("inf")]
    if not finite:
        return "×" * len(shown)
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] if abs(v) < float("inf") else "×" for v in shown)
