"""The log of a training run: the one object that the loop talks to.

    log = TrainingLog(metrics, writers, train_iters=1000, log_interval=10)
    log.start(state.iteration)
    while ...:
        ...                                          # the step
        log.step(result, state)
        with log.paused():                           # evaluation, saving
            ...
            log.event("save", iteration)
    log.close()

Every rank has a log and calls the same methods; only the log of the rank that logs has writers.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from megatron.core.pipeline_parallel import runner
from megatron.core.timers import Timers
from megatron.training.log.energy import EnergyMeter
from megatron.training.log.finite import NonFinite
from megatron.training.log.layer_reports import LayerReports
from megatron.training.log.memory import MemoryReport, memory_report
from megatron.training.log.metrics import MetricsInterval, StepMetrics
from megatron.training.log.records import (
    Event,
    LogRecord,
    LogWriter,
    Speed,
    StepRecord,
    StepResult,
    TaskRecord,
    ValidationRecord,
)
from megatron.training.log.throughput import StepClock, speed
from megatron.training.state import TrainState

TIMERS_OF_STEP = (
    "forward-backward",
    *dict.fromkeys(runner.TIMERS.values()),
    "batch-generator",
    "all-grads-sync",
    "optimizer",
)
"""Timers that a log line shows, in this order. Timers that did not run are left out."""


class TrainingLog:
    """Decides when values are read, and passes them to the writers.

    Args:
        metrics: this rank's accumulator.
        writers: where records go; empty on ranks that do not log.
        train_iters: number of iterations of the whole run, for the log line.
        log_interval: a line is written after every iteration that this number divides, and after the first of this run.
        world_size: number of ranks, for rates per device.
        tokens_per_sample: the sequence length.
        flops_per_sample: operations of forward and backward; None: no throughput.
        peak_tflops: peak rate of one device; None: no utilisation.
        log_throughput: put the throughput into the log line.
        layers: reads the values that layers report; None: they report nothing.
        per_layer: also write their values layer by layer.
        timers: the parts of a step, which are read with each log line.
        reports_memory: print the memory of this rank after the first line, when every buffer of a step exists.
        memory_interval: also print it after every iteration that this number divides; None: never.
        device_memory_used: log lines and these reports also have the memory in use on the whole device.
        energy: measures the energy of the GPUs; None: it is not logged.
        mix: returns the share of each data set in the first samples of the run; None without a blend.
        now: returns the wall time for the line's timestamp.
    """

    def __init__(
        self,
        metrics: StepMetrics,
        writers: Sequence[LogWriter],
        *,
        train_iters: int,
        log_interval: int,
        world_size: int = 1,
        tokens_per_sample: int | None = None,
        flops_per_sample: float | None = None,
        peak_tflops: float | None = None,
        log_throughput: bool = False,
        layers: LayerReports | None = None,
        per_layer: bool = False,
        timers: Timers | None = None,
        reports_memory: bool = False,
        memory_interval: int | None = None,
        device_memory_used: bool = False,
        energy: EnergyMeter | None = None,
        mix: Callable[[int], Mapping[str, float]] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.metrics = metrics
        self.writers = tuple(writers)
        self.train_iters = train_iters
        self.log_interval = log_interval
        self.world_size = world_size
        self.tokens_per_sample = tokens_per_sample
        self.flops_per_sample = flops_per_sample
        self.peak_tflops = peak_tflops
        self.log_throughput = log_throughput
        self.layers = layers
        self.per_layer = per_layer
        self.timers = timers or Timers(0, "max")
        self.mix = mix
        self._reports_memory, self._memory_interval = reports_memory, memory_interval
        self._device_memory_used = device_memory_used
        self.energy = energy
        self._now = now
        self._since_line = StepClock()
        self._since_flush = StepClock()
        self.first_non_finite: int | None = None
        """First iteration in which this rank found a non-finite value, among those read so far."""
        self._first: int | None = None
        self._iteration = self._consumed = 0
        self._line_samples = self._iterations_since_line = 0

    @property
    def tensorboard_writer(self) -> object:
        """torch's SummaryWriter of --tensorboard-dir; None without the flag, and on ranks that do not log."""
        return next((writer.tensorboard for writer in self.writers if writer.tensorboard is not None), None)

    @property
    def wandb(self) -> Any:
        """The `WandbWriter` of --wandb-project; None without the flag, and on ranks that do not log."""
        return next((writer.wandb for writer in self.writers if writer.wandb is not None), None)

    def start(self, iteration: int) -> None:
        """Starts the clocks. Training continues after `iteration` iterations."""
        self._first = iteration + 1
        self._since_line.restart()
        self._since_flush.restart()
        if self.energy is not None:
            self.energy.restart()

    def go_back(self, iteration: int) -> None:
        """Prepares for a run that goes back and continues after this earlier iteration. All ranks must call it."""
        self.flush()
        self.metrics.forget()
        self._line_samples = self._iterations_since_line = 0
        for writer in self.writers:
            writer.went_back(iteration)
        self.start(iteration)

    def step(self, result: StepResult, counts: TrainState) -> tuple[NonFinite, ...]:
        """Takes the results of one iteration, and writes a log line if one is due. `counts` are those of the run after
        the iteration. Returns the non-finite values that this rank knows of now; they were printed and logged
        already."""
        assert self._first is not None, "start() comes first"
        iteration, skipped_samples = counts.iteration, counts.skipped_train_samples
        self.metrics.record(result, counts)
        self._iteration, self._consumed = iteration, counts.consumed_train_samples
        self._iterations_since_line += 1
        for writer in self.writers:
            writer.progress(iteration)
        found: tuple[NonFinite, ...] = ()
        if iteration % self.log_interval == 0:
            found = self._line(reset=True, skipped_samples=skipped_samples)
        elif iteration == self._first:
            found = self._line(reset=False, skipped_samples=skipped_samples)
        every = self._memory_interval
        if self._reports_memory or (every is not None and iteration % every == 0):
            self._reports_memory = False  # the first step is the first report
            print(f"[Rank {self.metrics.rank}] (after {iteration} iterations) {self._memory()}", flush=True)
        return found

    def flush(self) -> tuple[NonFinite, ...]:
        """Writes the iterations recorded so far, without a log line. Waits for the device; every rank must call it."""
        return self._read(reset=False).non_finite

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Writes everything recorded, and does not count the time inside the context (evaluation, saving) as training
        time."""
        self.flush()
        energy = contextlib.nullcontext() if self.energy is None else self.energy.paused()
        with self._since_line.paused(), self._since_flush.paused(), energy:
            yield

    def validation(self, record: ValidationRecord) -> None:
        """Writes the result of an evaluation."""
        for writer in self.writers:
            writer.validation(record)

    def task(self, record: TaskRecord) -> None:
        """Writes the scores of an evaluation task."""
        for writer in self.writers:
            writer.task(record)

    def event(self, name: str, iteration: int, **facts: object) -> None:
        """Writes an event; `facts` are JSON values."""
        for writer in self.writers:
            writer.event(Event(name, iteration, facts))

    def close(self) -> None:
        """Writes all values that are not yet written, and closes the writers. Every rank must call it. After a failure
        call `close_writers`."""
        self.flush()
        self.close_writers()

    def close_writers(self) -> None:
        """Closes the writers without reading from the device and without other ranks."""
        for writer in self.writers:
            writer.close()

    def _read(self, *, reset: bool, **of_last: Any) -> MetricsInterval:
        """Reads what was recorded and writes it to files. `of_last` are further values of the last iteration."""
        interval = self._with_layers(self.metrics.collect(reset=reset), reset)
        if of_last and interval.steps:
            last = dataclasses.replace(interval.steps[-1], **of_last)
            interval = dataclasses.replace(interval, steps=(*interval.steps[:-1], last))
        seconds = self._since_flush.seconds()
        if interval.steps:
            self._since_flush.restart()
            samples = sum(step.global_batch_size for step in interval.steps)
            self._line_samples += samples
            rates = self._speed(seconds, len(interval.steps), samples)
            for writer in self.writers:
                writer.steps(interval.steps, rates)
        for step in interval.steps if self.writers else ():
            if step.loss_spike and step.losses:
                self._name_spike(step)
        for found in interval.non_finite:
            print(f"non-finite: {found}", file=sys.stderr, flush=True)
            self.event("non-finite", found.iteration, what=str(found))
            self.first_non_finite = min(found.iteration, self.first_non_finite or found.iteration)
        return interval

    def _name_spike(self, step: StepRecord) -> None:
        name, loss = next(iter(step.losses.items()))
        print(
            f"loss spike: iteration {step.iteration}: {name} {loss:.6g} is {step.loss_z_score:.1f} standard deviations "
            "above the losses before it; its update is left out",
            flush=True,
        )
        self.event("loss-spike", step.iteration, loss=loss, z_score=step.loss_z_score)

    def _with_layers(self, interval: MetricsInterval, reset: bool) -> MetricsInterval:
        """Adds the values that layers report. Files get those since the last read, with the last iteration; the log
        line gets those since the last line."""
        if self.layers is None or not interval.steps:
            return interval
        read, line = self.layers.collect(reset=reset)
        last = dataclasses.replace(interval.steps[-1], reported=read.tags(per_layer=self.per_layer))
        losses = {**interval.losses, **line.line()}
        return dataclasses.replace(interval, steps=(*interval.steps[:-1], last), losses=losses)

    def _line(self, *, reset: bool, skipped_samples: int) -> tuple[NonFinite, ...]:
        times, iterations = self._times(reset), self._iterations_since_line
        longest = {name: max(seconds) / iterations for name, seconds in times.items() if max(seconds) > 0.0}
        joules = None if self.energy is None else self.energy.joules_per_gpu()
        interval = self._read(
            reset=reset,
            times=longest,
            memory=self._memory() if self.writers else None,
            seconds_left=(self.train_iters - self._iteration) * self._since_line.seconds() / iterations,
            mix={} if self.mix is None or not self.writers else self.mix(self._consumed),
            energy_joules=None if joules is None else joules / iterations,
            power_watts=None if joules is None else joules / self._since_line.seconds(),
        )
        record = LogRecord(
            time=self._now(),
            step=interval.steps[-1],
            train_iters=self.train_iters,
            losses=interval.losses,
            speed=self._speed(self._since_line.seconds(), interval.iterations, self._line_samples),
            shows_throughput=self.log_throughput,
            skipped_samples=skipped_samples,
            skipped_iterations=interval.skipped,
            nan_iterations=interval.nan,
            times=self.timers.text_of(times, normalizer=iterations),
        )
        for writer in self.writers:
            writer.line(record)
        if reset:
            self._since_line.restart()
            if self.energy is not None:
                self.energy.restart()
            self._line_samples = self._iterations_since_line = 0
        return interval.non_finite

    def _memory(self) -> MemoryReport:
        return memory_report(self.metrics.device, device_used=self._device_memory_used)

    def _times(self, reset: bool) -> dict[str, list[float]]:
        """Returns the seconds of the timers of a step on every rank, since the last line. Every rank calls it."""
        return self.timers.seconds_of_ranks(TIMERS_OF_STEP, reset) if self.timers.log_level > 0 else {}

    def _speed(self, seconds: float, iterations: int, samples: int) -> Speed:
        """Returns the rates of `iterations` steps over `samples` samples."""
        return speed(
            seconds,
            iterations,
            tokens=None if self.tokens_per_sample is None else self.tokens_per_sample * samples,
            flops=None if self.flops_per_sample is None else self.flops_per_sample * samples,
            world_size=self.world_size,
            peak_tflops=self.peak_tflops,
        )
