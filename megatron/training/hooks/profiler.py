"""Profiles of steps, and recordings of GPU memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.core.exceptions import UserError
from megatron.core.utils.torch_private import dump_memory_snapshot, record_memory_history
from megatron.training.config.log import LoggingConfig
from megatron.training.hooks.hook import Hook


class NsightProfiler(Hook):
    """Tells Nsight Systems when to record: steps with `start` <= iterations done < `end`.

    The run must be started under `nsys profile --capture-range=cudaProfilerApi`. Every operator gets an NVTX range.
    Raises UserError without CUDA.
    """

    def __init__(self, start: int, end: int, *, record_shapes: bool = False) -> None:
        if not torch.cuda.is_available():
            raise UserError(
                "--profile records with Nsight Systems, which needs CUDA; add --use-pytorch-profiler to profile here"
            )
        self.start, self.end = start, end
        self._record_shapes = record_shapes
        self._ranges: Any = None

    def before_step(self, iteration: int) -> None:
        """Starts the recording before step `start`."""
        if iteration == self.start:
            torch.cuda.cudart().cudaProfilerStart()
            self._ranges = torch.autograd.profiler.emit_nvtx(record_shapes=self._record_shapes)
            self._ranges.__enter__()

    def after_step(self, iteration: int) -> None:
        """Stops the recording after step `end`."""
        if iteration == self.end:
            self._stop()

    def on_exit(self, iteration: int) -> None:
        """Stops a recording that is still running."""
        self._stop()

    def _stop(self) -> None:
        if self._ranges is not None:
            self._ranges.__exit__(None, None, None)
            self._ranges = None
            torch.cuda.cudart().cudaProfilerStop()


class TorchProfiler(Hook):
    """Records the steps with `start` <= iterations done < `end` with PyTorch's profiler, after one step of warm-up.

    A Chrome trace `rank_00000.steps_10_12.trace.json` is written into `directory` when the last step is recorded, or at
    the run's end if that comes first. `with_execution_trace` adds `...execution_trace.json`.
    """

    def __init__(
        self,
        start: int,
        end: int,
        directory: str | Path,
        rank: int,
        *,
        record_shapes: bool = False,
        with_stack: bool = False,
        with_execution_trace: bool = False,
    ) -> None:
        self.start, self.end = start, end
        self.execution_trace: Path | None = None
        """Path of PyTorch's execution trace (the graph of operators, which Chakra reads); None until it begins."""
        self._with_execution_trace = with_execution_trace
        self.directory, self.rank = Path(directory), rank
        self.trace: Path | None = None
        """Path of the trace; None until it is written."""
        self._options: dict[str, Any] = {"record_shapes": record_shapes, "with_stack": with_stack}
        self._profiler: Any = None
        self._observer: Any = None
        self._first = 0

    def before_step(self, iteration: int) -> None:
        """Starts the profiler one step before the first recorded one."""
        if self._profiler is None and self.trace is None and max(self.start - 1, 0) <= iteration < self.end:
            self._first = max(iteration, self.start)
            warmup = self._first - iteration
            if self._with_execution_trace:
                self.execution_trace = self._file("execution_trace")
                self._observer = torch.profiler.ExecutionTraceObserver()
                self._observer.register_callback(str(self.execution_trace))
            self._profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=0, warmup=warmup, active=self.end - self._first, repeat=1),
                on_trace_ready=self._write,
                execution_trace_observer=self._observer,
                **self._options,
            )
            self._profiler.start()

    def after_step(self, iteration: int) -> None:
        """Counts a step; writes the trace after the last one."""
        if self._profiler is not None:
            self._profiler.step()
            if iteration >= self.end:
                self._stop()

    def on_exit(self, iteration: int) -> None:
        """Stops the profiler and writes what was recorded."""
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            if self._observer is not None:
                self._observer.unregister_callback()  # ends the file
                self._observer = None

    def _file(self, kind: str) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        return self.directory / f"rank_{self.rank:05d}.steps_{self._first}_{self.end}.{kind}.json"

    def _write(self, profiler: Any) -> None:
        self.trace = self._file("trace")
        profiler.export_chrome_trace(str(self.trace))
        print(f"profile of steps {self._first} to {self.end} written to {self.trace}", flush=True)


def make_profiler(flags: LoggingConfig, rank: int, directory: str | Path | None) -> Hook | None:
    """Returns the profiler that the flags ask for; None on a rank that is not in --profile-ranks. For Nsight Systems on
    a machine without CUDA it prints a line and returns None.

    Raises UserError if the steps are not in order, or if PyTorch's traces have no `directory`.
    """
    start, end = flags.profile_step_start, flags.profile_step_end
    if not 0 <= start < end:
        raise UserError(f"--profile-step-start {start} --profile-step-end {end}: the end must come after the start")
    if rank not in flags.profile_ranks:
        return None
    record_shapes = flags.record_shapes or flags.pytorch_profiler_collect_shapes
    if not flags.use_pytorch_profiler and not torch.cuda.is_available():
        print(
            "--profile: nothing is recorded, since Nsight Systems needs CUDA; --use-pytorch-profiler records here too",
            flush=True,
        )
        return None
    if not flags.use_pytorch_profiler:
        return NsightProfiler(start, end, record_shapes=record_shapes)
    if directory is None:
        raise UserError("--use-pytorch-profiler writes into --tensorboard-dir or --save; neither is given")
    return TorchProfiler(
        start,
        end,
        directory,
        rank,
        record_shapes=record_shapes,
        with_stack=flags.pytorch_profiler_collect_callstack,
        with_execution_trace=flags.pytorch_profiler_collect_chakra,
    )


def nvtx_marks(*, wanted: bool, use_pytorch_profiler: bool, notes: bool) -> Callable[[str], Any] | None:
    """Returns the function that makes the ranges of --nvtx-ranges, for `Timers`. Returns None if they are not `wanted`.
    If nothing would record them, it also returns None and prints a line on the rank with `notes`."""
    if not wanted:
        return None
    if not use_pytorch_profiler and torch.cuda.is_available():
        return torch.cuda.nvtx.range
    if notes:
        reason = "PyTorch's profiler does not record them" if use_pytorch_profiler else "they need CUDA"
        print(f"--nvtx-ranges: no ranges are made, since {reason}", flush=True)
    return None


MAX_ENTRIES = 100_000
"""Allocations and releases that torch keeps; older ones are dropped."""


class MemoryHistory(Hook):
    """Records allocations from the first step on. Writes a snapshot at each log line and when the run ends, also after
    an error such as lack of memory; the newest replaces the one before.

    `record` and `dump` are torch's functions. Raises UserError if the snapshot cannot be written when the run starts.
    """

    def __init__(
        self,
        path: Path,
        log_interval: int,
        record: Callable[[int | None], None] = record_memory_history,
        dump: Callable[[str], None] = dump_memory_snapshot,
    ) -> None:
        self.path = path
        self._interval = log_interval
        self._record, self._dump = record, dump

    def on_start(self, iteration: int) -> None:
        """Starts the recording."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        except OSError as error:
            raise UserError(f"--memory-snapshot-path {self.path}: {error.strerror}") from None
        self._record(MAX_ENTRIES)

    def after_step(self, iteration: int) -> None:
        """Writes a snapshot if a log line is due."""
        if iteration % self._interval == 0:
            self._write()

    def on_exit(self, iteration: int) -> None:
        """Writes the last snapshot and ends the recording."""
        self._write()
        self._record(None)
        print(f"--record-memory-history: {self.path} has the last {MAX_ENTRIES:,} allocations", flush=True)

    def _write(self) -> None:
        aside = self.path.with_name(f".{self.path.name}.tmp")
        self._dump(str(aside))
        aside.replace(self.path)


def make_memory_history(path: str, rank: int, ranks: list[int], log_interval: int) -> MemoryHistory | None:
    """Returns the hook for a rank; None on ranks that are not in `ranks` and, with a printed line, without CUDA.

    The first of `ranks` writes to `path`; the others write to files beside it with their rank in the name.
    """
    if rank not in ranks:
        return None
    if not torch.cuda.is_available():
        print("--record-memory-history: nothing is recorded, since only allocations on GPUs can be", flush=True)
        return None
    place = Path(path)
    return MemoryHistory(place if rank == ranks[0] else place.with_stem(f"{place.stem}.rank_{rank:05d}"), log_interval)
