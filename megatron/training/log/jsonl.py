"""metrics.jsonl: one JSON object per line, for programs to read.

Kinds of lines, recognised by their keys:

    {"iteration": 7, "consumed samples": 56, "tokens": 57344, "lm loss": 4.1, "grad norm": 0.9, "learning rate": 0.001,
     "loss scale": 1.0, "global batch size": 8, "ms per iteration": 81.2, "tokens per second": 100912.3, ...}
    {"iteration": 10, "split": "validation", "lm loss": 4.0, "lm loss PPL": 54.6, "evaluated tokens": 8192, ...}
    {"iteration": 10, "task": "capitals", "acc": 0.5, "acc stderr": 0.1, "documents": 26, ...}
    {"iteration": 10, "event": "save", ...}

Every iteration has a training line with its own values. Three kinds of values are means over the interval between two
log lines: the speed, the values that layers report, and the times of --timing-log-level ("optimizer ms"). The last two
are only in the line of the interval's last iteration. That line also has the memory of the rank that logs, and the time
left. For a blend of data sets each line has `"lm loss on source NAME"` and `"tokens on source NAME"` of the data sets
in the step's batch. The line of an interval's last iteration also has `"share of samples on source NAME"`: the mix of
the run so far.

`"skipped": true` marks an iteration whose update was not applied. JSON has no NaN: a value that is not finite is null,
and `"non_finite": {"lm loss": "nan"}` beside it says what it was.

A run that resumes at iteration N continues the file. Lines beyond N, which the resumed run writes again, and an
incomplete last line (after a kill) are moved to `<name>.superseded.jsonl` beside it, so that the file never holds two
lines for one iteration. If it has nothing to do but evaluate, the evaluations of iteration N are moved, too.
"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.training.data.sources import SOURCE
from megatron.training.log.console_line import perplexity
from megatron.training.log.memory import MemoryReport
from megatron.training.log.records import Event, LogWriter, Speed, StepRecord, TaskRecord, ValidationRecord


class JsonlLog(LogWriter):
    """Appends records to a metrics.jsonl. Create it after the checkpoint is loaded.

    Args:
        path: the file; its folder is created if needed.
        resumed_iteration: iterations that the run has done (0: a new run); later lines of the file are moved aside (see
            the module's text).
        evaluates_again: so are the evaluations of this iteration.
        named_by: the flag that an error names if the file cannot be written.

    Raises UserError if the file cannot be written. Once it is open, a failed write (a full disk) does not stop the run:
    the lines are dropped and counted, and the first failure is printed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        resumed_iteration: int = 0,
        named_by: str = "--metrics-path",
        evaluates_again: bool = False,
    ) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._named_by = named_by
        self._open(resumed_iteration, evaluates_again)

    def _open(self, resumed_iteration: int, evaluates_again: bool = False) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.superseded = supersede(self.path, resumed_iteration, evaluates_again)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._torn = not _ends_in_a_line(self.path)
        except OSError as error:
            raise UserError(f"{self._named_by} {self.path} cannot be written: {error.strerror or error}") from error
        if self.superseded.path is not None:
            torn = ", the last one torn" if self.superseded.torn else ""
            what = f"of evaluations of iteration {resumed_iteration}, and" if evaluates_again else ""
            print(
                f"{self.path}: {self.superseded.lines} lines {what}beyond iteration {resumed_iteration}{torn}: "
                f"moved to {self.superseded.path}",
                flush=True,
            )

    def steps(self, steps: Sequence[StepRecord], speed: Speed) -> None:
        """Writes a line for each iteration."""
        self._write([step_line(step, speed) for step in steps])

    def validation(self, record: ValidationRecord) -> None:
        """Writes a line for an evaluation."""
        self._write([validation_line(record)])

    def task(self, record: TaskRecord) -> None:
        """Writes a line for an evaluation task."""
        self._write([task_line(record)])

    def event(self, event: Event) -> None:
        """Writes a line for an event."""
        self._write([{"iteration": event.iteration, "event": event.name, **event.facts}])

    def went_back(self, iteration: int) -> None:
        """Moves the lines beyond this iteration aside, as a resumed run does."""
        self.close()
        self._open(iteration)

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, lines: Sequence[Mapping[str, object]]) -> None:
        if not lines:
            return
        assert self._file >= 0, f"{self.path} is closed"
        content = "".join(to_json(line) + "\n" for line in lines).encode()
        if self._torn:  # ends an incomplete line, so that this one is readable
            content = b"\n" + content
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            self._torn = False
        except OSError as error:
            self._torn = self._torn or written > 0
            if not self.dropped:
                print(
                    f"warning: {self.path}: {error.strerror}; metrics are dropped until it can be written", flush=True
                )
            self.dropped += len(lines)


def step_line(step: StepRecord, speed: Speed) -> dict[str, object]:
    """Returns the training line of an iteration."""
    line: dict[str, Any] = {
        "iteration": step.iteration,
        "consumed samples": step.consumed_samples,
        "tokens": step.tokens,
        **step.losses,
        **{name: loss for name, (loss, _) in step.by_source.items()},
        **{f"tokens{SOURCE}{name.partition(SOURCE)[2]}": round(count) for name, (_, count) in step.by_source.items()},
        **{f"share of samples{SOURCE}{name}": share for name, share in step.mix.items()},
        **step.reported,
        "grad norm": step.grad_norm,
        "learning rate": step.learning_rate,
        "decoupled learning rate": step.decoupled_learning_rate,
        "loss scale": step.loss_scale,
        "global batch size": step.global_batch_size,
        "params norm": step.params_norm,
        "max attention logit": step.max_attention_logit,
        "num zeros": step.num_zeros,
        "loss z-score": step.loss_z_score,
        "ms per iteration": speed.seconds_per_iteration * 1000.0,
        "tokens per second": speed.tokens_per_second,
        "throughput (TFLOP/s/GPU)": speed.tflops_per_device,
        "mfu": speed.mfu,
        "energy per GPU (J/iter/GPU)": step.energy_joules,
        "power per GPU (W/GPU)": step.power_watts,
        "seconds left": step.seconds_left,
        **({} if step.memory is None else _memory(step.memory)),
        **{f"{name} ms": seconds * 1000.0 for name, seconds in step.times.items()},
    }
    line = {key: value for key, value in line.items() if value is not None}
    if not step.applied:
        line["skipped"] = True
    return line


def _memory(report: MemoryReport) -> dict[str, float | None]:
    found = {
        "host memory (MB)": report.host_resident,
        "device memory (MB)": report.device_allocated,
        "peak device memory (MB)": report.device_peak_allocated,
        "device memory used (MB)": report.device_used,
    }
    return {name: None if count is None else round(count / 2**20, 1) for name, count in found.items()}


def task_line(record: TaskRecord) -> dict[str, Any]:
    """Returns the line of an evaluation task."""
    line: dict[str, Any] = {"iteration": record.iteration, "task": record.task}
    for metric, (value, error) in record.scores.items():
        line |= {metric: value} if error is None else {metric: value, f"{metric} stderr": error}
    return line | {"documents": record.documents, "consumed samples": record.consumed_samples}


def validation_line(record: ValidationRecord) -> dict[str, object]:
    """Returns the line of an evaluation."""
    line: dict[str, Any] = {"iteration": record.iteration, "split": record.split}
    for name, loss in record.losses.items():
        line[name] = loss
        line[f"{name} PPL"] = perplexity(loss)
    line |= {"consumed samples": record.consumed_samples, "seconds": record.seconds}
    line |= {"evaluated tokens": record.tokens, "evaluated samples": record.samples}
    return {key: value for key, value in line.items() if value is not None}


def to_json(line: Mapping[str, object]) -> str:
    """Returns one line of JSON. A float that is not finite becomes null and is named under "non_finite"."""
    bad = {key: str(value) for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
    finite = {key: None if key in bad else value for key, value in line.items()}
    if bad:
        finite["non_finite"] = bad
    return json.dumps(finite, allow_nan=False, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------------------------------
# Continuing a file


@dataclass(frozen=True)
class Superseded:
    """The lines that `supersede` moved out of a file."""

    lines: int = 0
    torn: bool = False
    """Whether the last line was incomplete."""
    path: Path | None = None
    """The file that the lines were moved to; None if there were none."""


def supersede(path: Path, resumed_iteration: int, evaluates_again: bool = False) -> Superseded:
    """Cuts a metrics file at the first line beyond `resumed_iteration` and appends the lines to a file beside it. With
    `evaluates_again`, lines of evaluations of this iteration are moved there, too.

    Lines are in the order of iterations, so all lines after the first one are superseded, except events between such
    evaluations. A kill between the writes leaves the file unchanged or without these events; the file beside it may
    then get its lines twice.
    """
    if not path.exists():
        return Superseded()
    cut, lines, torn = _first_superseded(path, resumed_iteration, evaluates_again)
    if cut == path.stat().st_size:
        return Superseded()
    aside, events = path.with_suffix(f".superseded{path.suffix}"), []
    with open(path, "r+b") as file:
        file.seek(cut)
        with open(aside, "ab") as kept:
            for raw in file:
                line = _parse(raw)
                of_checkpoint = line is not None and "event" in line and _iteration_of(line) <= resumed_iteration
                if evaluates_again and of_checkpoint:
                    events.append(raw)
                else:
                    kept.write(raw)
            if torn:
                kept.write(b"\n")
            kept.flush()
            os.fsync(kept.fileno())
        file.seek(cut)
        file.truncate()
        file.writelines(events)
        file.flush()
        os.fsync(file.fileno())
    return Superseded(lines - len(events), torn, aside)


def _first_superseded(path: Path, resumed_iteration: int, evaluates_again: bool) -> tuple[int, int, bool]:
    """Returns the offset of the cut, the number of lines after it, and whether the last one is incomplete."""
    offset = lines = 0
    cut: int | None = None
    torn = False
    with open(path, "rb") as file:
        for raw in file:
            line = _parse(raw)
            torn = line is None and not raw.endswith(b"\n")
            if cut is None and _is_superseded(line, raw, resumed_iteration, evaluates_again):
                cut = offset
            lines += cut is not None
            offset += len(raw)
    return (offset if cut is None else cut), lines, torn


def _is_superseded(
    line: Mapping[str, object] | None, raw: bytes, resumed_iteration: int, evaluates_again: bool
) -> bool:
    if line is None and not raw.endswith(b"\n"):
        return True
    iteration = _iteration_of(line)
    of_evaluation = evaluates_again and line is not None and ("split" in line or "task" in line)
    return iteration >= resumed_iteration if of_evaluation else iteration > resumed_iteration


def _iteration_of(line: Mapping[str, object] | None) -> int:
    iteration = None if line is None else line.get("iteration")
    return iteration if isinstance(iteration, int) else 0


def _ends_in_a_line(path: Path) -> bool:
    """Returns whether appended text starts a new line."""
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _parse(raw: bytes) -> dict[str, object] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass
class MetricsHistory:
    """The content of a metrics file."""

    training: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    """Evaluations of every split."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """Scores of evaluation tasks."""
    events: list[dict[str, object]] = field(default_factory=list)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Returns iterations and values of the training lines that have a finite value under `key`."""
        return _series(self.training, key)

    def validation_series(self, key: str, split: str = "validation") -> tuple[list[int], list[float]]:
        """Returns iterations and values over the evaluations of one split."""
        return _series([line for line in self.validation if line["split"] == split], key)


def read_metrics(path: str | os.PathLike[str]) -> MetricsHistory:
    """Reads a metrics.jsonl. Raises UserError if it cannot be read. Leaves out lines that a kill or a full disk cut
    off, and prints their number to stderr."""
    try:
        with open(path, "rb") as file:
            lines = [_parse(raw) for raw in file if raw.strip()]
    except OSError as error:
        raise UserError(f"{os.fspath(path)}: cannot read the metrics: {error.strerror or error}") from error
    history, torn = MetricsHistory(), 0
    for line in lines:
        if line is None:
            torn += 1
        elif "event" in line:
            history.events.append(line)
        elif "task" in line:
            history.tasks.append(line)
        elif "split" in line:
            history.validation.append(line)
        else:
            history.training.append(line)
    if torn:
        print(f"warning: {os.fspath(path)}: {torn} lines are not JSON objects and are left out", file=sys.stderr)
    return history


def _series(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    found = [(line["iteration"], line[key]) for line in lines if isinstance(line.get(key), int | float)]
    return [iteration for iteration, _ in found], [value for _, value in found]
