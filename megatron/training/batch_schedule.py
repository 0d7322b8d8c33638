"""The number of micro-batches of a step: constant, or growing with the consumed samples."""

import copy
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from megatron.core.exceptions import UserError


class _BatchFlags(Protocol):
    """The flags that determine the batch size: TrainingConfig, or settings before a config is made."""

    @property
    def global_batch_size(self) -> int | None: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def rampup_batch_size(self) -> list[int] | None: ...
    @property
    def step_batch_size_schedule(self) -> str | None: ...
    @property
    def decrease_batch_size_if_needed(self) -> bool: ...


@dataclass(frozen=True)
class RampUp:
    """--rampup-batch-size: the batch size grows from `start` in steps of `increment` over `samples` samples."""

    start: int
    increment: int
    samples: int

    def size(self, consumed_samples: int, final: int) -> int:
        """Returns the global batch size after `consumed_samples`; `final` is its last value."""
        if consumed_samples > self.samples:
            return final
        samples_per_increment = self.samples / ((final - self.start) / self.increment)
        return min(final, self.start + int(consumed_samples / samples_per_increment) * self.increment)


@dataclass(frozen=True)
class BatchSteps:
    """--step-batch-size-schedule: the global batch size changes at given numbers of consumed samples."""

    steps: tuple[tuple[int, int], ...]
    """Pairs (consumed samples, batch size from then on), in ascending order; the first pair is at 0 samples."""

    @classmethod
    def parse(cls, text: str, seq_length: int) -> "BatchSteps":
        """Reads TOKENS:SIZE pairs, such as "0:384 200B:768", where K, M, B and T stand for thousands to trillions.

        Raises UserError for another form, or if tokens or sizes are not in order.
        """
        steps = []
        for pair in text.split():
            found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", pair)
            if found is None:
                raise UserError(f"{pair}: expected TOKENS:SIZE, such as 200B:768")
            tokens = round(float(found[1]) * 1000 ** " KMBT".index(found[2] or " "))
            steps.append((-(-tokens // seq_length), int(found[3])))
        if not steps or steps[0][0] != 0 or min(size for _, size in steps) < 1:
            raise UserError("the first pair must begin at 0 tokens, and each size must be at least 1")
        if any(later[0] <= sooner[0] for sooner, later in itertools.pairwise(steps)):
            raise UserError(f"the numbers of tokens must grow by at least one sample of {seq_length} from pair to pair")
        return cls(tuple(steps))

    def size(self, consumed_samples: int, final: int) -> int:
        """Returns the global batch size after `consumed_samples`."""
        return next(size for start, size in reversed(self.steps) if start <= consumed_samples)


@dataclass
class BatchSchedule:
    """The global batch size over a run. Raises UserError for a size that is no multiple of micro-batch size x data
    parallel size."""

    final_global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    rampup: RampUp | BatchSteps | None = None
    decrease_if_needed: bool = False
    """Round down a global batch size that does not divide evenly, instead of refusing it."""
    scheduled_global_batch_size: int = field(init=False)
    """Global batch size of the schedule now."""
    global_batch_size: int = field(init=False)
    """Number of samples of a step now: the scheduled size, possibly rounded down."""

    def __post_init__(self) -> None:
        for name in ("final_global_batch_size", "micro_batch_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.removeprefix('final_')} is {getattr(self, name)}; it must be at least 1")
        if isinstance(self.rampup, RampUp):
            self._check_rampup(self.rampup)
        self._rounded_down(self.final_global_batch_size)
        self.update(0)

    @classmethod
    def from_config(cls, config: _BatchFlags, data_parallel_size: int, seq_length: int) -> "BatchSchedule":
        """Returns the schedule of these flags. Default batch size: a micro-batch on each data parallel rank."""
        size = config.global_batch_size or config.micro_batch_size * data_parallel_size
        growth: RampUp | BatchSteps | None = None
        if config.rampup_batch_size:
            growth = RampUp(*map(int, config.rampup_batch_size))
        elif config.step_batch_size_schedule is not None:
            growth = BatchSteps.parse(config.step_batch_size_schedule, seq_length)
        return cls(size, config.micro_batch_size, data_parallel_size, growth, config.decrease_batch_size_if_needed)

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches of a step on each data parallel rank, now."""
        return self.global_batch_size // self.samples_at_once

    @property
    def final_num_microbatches(self) -> int:
        """Number of micro-batches at the final batch size. Evaluation always uses it."""
        return self._rounded_down(self.final_global_batch_size) // self.samples_at_once

    @property
    def samples_at_once(self) -> int:
        """Number of samples in one micro-batch of all data parallel ranks."""
        return self.micro_batch_size * self.data_parallel_size

    def samples_of(self, iterations: int, consumed: int = 0) -> int:
        """Returns the number of samples of the first `iterations` steps; with `consumed`, the number after `iterations`
        steps that begin after this many samples."""
        final = self._rounded_down(self.final_global_batch_size, check=False)
        if isinstance(self.rampup, BatchSteps):
            for start, end in itertools.pairwise((*(start for start, _ in self.rampup.steps), None)):
                size = self._rounded_down(self.rampup.size(start or 0, final), check=False)
                count = iterations if end is None else min(iterations, max(0, -(-(end - consumed) // size)))
                consumed, iterations = consumed + count * size, iterations - count
        elif self.rampup is not None:
            while iterations and consumed <= self.rampup.samples:
                size = self.rampup.size(consumed, self.final_global_batch_size)
                consumed, iterations = consumed + self._rounded_down(size, check=False), iterations - 1
        return consumed + iterations * final

    def iterations_of(self, samples: int, consumed: int = 0) -> int:
        """Returns the number of whole steps that the first `samples` samples are enough for; with `consumed`, the
        number of those that begin after this many samples."""
        final, iterations = self._rounded_down(self.final_global_batch_size, check=False), 0
        if isinstance(self.rampup, BatchSteps):
            ends = [start for start, _ in self.rampup.steps[1:]]
            for (_, size), end in zip(self.rampup.steps, [*ends, samples], strict=True):
                size = self._rounded_down(size, check=False)
                count = max(0, min(-(-(end - consumed) // size), (samples - consumed) // size))
                iterations, consumed = iterations + count, consumed + count * size
            return iterations
        while self.rampup is not None and consumed <= self.rampup.samples:
            size = self._rounded_down(self.rampup.size(consumed, self.final_global_batch_size), check=False)
            if consumed + size > samples:
                return iterations
            iterations, consumed = iterations + 1, consumed + size
        return iterations + max(0, samples - consumed) // final

    def update(self, consumed_samples: int, check: bool = True) -> None:
        """Sets the sizes for the step that starts after `consumed_samples`."""
        final = self.final_global_batch_size
        self.scheduled_global_batch_size = self.rampup.size(consumed_samples, final) if self.rampup else final
        self.global_batch_size = self._rounded_down(self.scheduled_global_batch_size, check)

    def sizes_after(self, consumed_samples: int) -> Iterator[int]:
        """Yields the number of samples of each step that follows after `consumed_samples`, without end."""
        schedule = copy.copy(self)
        while True:
            schedule.update(consumed_samples)
            yield schedule.global_batch_size
            consumed_samples += schedule.global_batch_size

    def _rounded_down(self, size: int, check: bool = True) -> int:
        at_once = self.samples_at_once
        whole = size // at_once * at_once
        if whole == size or (self.decrease_if_needed and whole):
            return whole
        if check:
            works = f"{whole} or {whole + at_once}" if whole else str(at_once)
            raise UserError(
                f"--global-batch-size {size} is no multiple of --micro-batch-size {self.micro_batch_size} x "
                f"{self.data_parallel_size} data parallel ranks = {at_once}; {works} would work"
            )
        return max(whole, at_once)

    def _check_rampup(self, rampup: RampUp) -> None:
        words = f"--rampup-batch-size {rampup.start} {rampup.increment} {rampup.samples}"
        growth = self.final_global_batch_size - rampup.start
        if rampup.start < 1 or rampup.increment < 1 or rampup.samples < 0 or growth < 0:
            raise UserError(
                f"{words}: start and increment must be positive, and start at most --global-batch-size "
                f"{self.final_global_batch_size}"
            )
        if growth % rampup.increment:
            raise UserError(
                f"{words}: --global-batch-size {self.final_global_batch_size} minus the start must be a multiple of "
                f"the increment; {self.final_global_batch_size - growth % rampup.increment} would work"
            )
