"""The micro-batches of a training step as the forward step draws them, with their positions in the run."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.timers import Timers, timed
from megatron.core.tokens import RngPosition
from megatron.training.data.batch import Batch
from megatron.training.data.recent_steps import RecentSteps


class StepData(Iterator[Any]):
    """Yields the micro-batches of an iterator, and records the samples of those drawn in the current step.

    A single model chunk draws from this object. With virtual pipeline stages, each chunk draws all micro-batches at its
    own pace, from an iterator of its own (`iterators`).

    Args:
        micro_batches: this rank's micro-batches in order. None: this rank reads no data, and its forward step gets None
            as iterator, as in Megatron-LM scripts where another rank reads and broadcasts.
        micro_batch_size, data_parallel_rank, data_parallel_size: they determine the rows of the global batch:
            micro-batch m of rank r begins at sample (m * ranks + r) * micro_batch_size.
        seed: seed of dropout.
        timers: measure the reads (`batch-generator`, level 2).
        regroups: the micro-batches are those of dynamic context parallelism, whose number differs from step to step.
    """

    def __init__(
        self,
        micro_batches: Iterator[Any] | None,
        *,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        seed: int = 1234,
        timers: Timers | None = None,
        regroups: bool = False,
    ) -> None:
        self.micro_batches = micro_batches
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.seed = seed
        self.timers = timers
        self.regroups = regroups
        self.iteration = 0
        self.sample_ids: list[list[int]] = []
        """Sample ids of each micro-batch drawn since `begin`; an empty list for a batch without ids."""
        self.recent: RecentSteps | None = None
        """The micro-batches of the last steps; None without `keep_recent_steps`."""
        self._keeps_step = False
        """Whether the micro-batches of a step are kept until the next one begins."""
        self._step: list[Any] = []
        self._chunks: tuple[ChunkData, ...] = ()
        self._kept: dict[int, Any] = {}
        """Micro-batches of the step, by index, that some chunk has not drawn yet."""
        self._ahead: list[Batch] = []
        """The first micro-batch of the step, read for its number of micro-batches."""
        self._counted = not regroups

    def begin(self, iteration: int) -> None:
        """Begins the step that follows after `iteration` steps."""
        numbers = {chunk.drawn for chunk in self._chunks if chunk.drawn}  # a script's chunk may draw nothing
        assert len(numbers) < 2, f"chunks drew different numbers of micro-batches in a step: {sorted(numbers)}"
        for chunk in self._chunks:
            chunk.drawn = 0
        self._kept.clear()
        self._step.clear()
        self.iteration = iteration
        self.sample_ids = []
        self._counted = not self.regroups

    def count(self, planned: int) -> int:
        """Returns the number of micro-batches of the step that has begun: `planned`, or the number that dynamic context
        parallelism gives to this rank."""
        if not self.regroups or self.micro_batches is None:
            return planned
        self._counted = True
        self._ahead = list(itertools.islice(self.micro_batches, 1))  # empty at the end of the data
        return self._ahead[0].of_step or planned if self._ahead else planned

    def restart(self) -> None:
        """Begins an evaluation. It reads the samples of the one before if the micro-batches can go back to the first;
        otherwise, the samples that follow."""
        restart = getattr(self.micro_batches, "restart", None)
        if restart is not None:
            restart()
        self.begin(self.iteration)

    def keep_step(self) -> None:
        """From now on, keeps the micro-batches of each step until the next one begins, so that `rewind` works."""
        self._keeps_step = True

    @contextlib.contextmanager
    def keeping_step(self) -> Iterator[None]:
        """Does what `keep_step` does, inside the context only."""
        before, self._keeps_step = self._keeps_step, True
        try:
            yield
        finally:
            self._keeps_step = before

    def keep_recent_steps(self) -> None:
        """From now on, keeps the micro-batches of the last steps in `recent`."""
        self.recent = RecentSteps()

    def rewind(self) -> bool:
        """Goes back to the first micro-batch of the step. Returns False if the step was not kept (`keep_step`)."""
        if not self._keeps_step:
            return False
        for chunk in self._chunks:
            chunk.drawn = 0
        self._kept.clear()
        self.sample_ids = []
        return True

    def iterators(self, num_chunks: int) -> list[Any]:
        """Returns the iterators from which this rank's model chunks draw. Earlier iterators must not be used any
        more."""
        if self.micro_batches is None:
            return [None] * num_chunks
        if num_chunks == 1:
            return [self]
        if len(self._chunks) != num_chunks:
            self._chunks = tuple(ChunkData(self) for _ in range(num_chunks))
        return [*self._chunks]

    def __next__(self) -> Any:
        if self.micro_batches is None:
            raise StopIteration
        number = len(self.sample_ids)
        if number < len(self._step):
            batch = self._step[number]
        else:
            with timed(self._timers_of_read(), "batch-generator", 2):
                batch = self._ahead.pop() if self._ahead else next(self.micro_batches)
            if not self._counted:
                raise UserError(
                    "--hybrid-context-parallel needs pretrain(), which counts the micro-batches of each step"
                )
            if self._keeps_step or self.recent is not None:
                batch = _out_of_shared_memory(batch)
            if self.recent is not None:
                self.recent.add(batch)
        if self._keeps_step and number == len(self._step):
            self._step.append(batch)
        # Numbers, not the tensor: one that a worker sent keeps a file open, and these ids are kept until the log line.
        self.sample_ids.append(_numbers(getattr(batch, "sample_ids", None)))
        return batch

    def _timers_of_read(self) -> Timers | None:
        """Returns the timers that measure a read. None without timers, and if the forward step measures the read itself
        under the same name, as those of Megatron-LM's scripts do."""
        if self.timers is None or self.timers("batch-generator", log_level=2).running:
            return None
        return self.timers

    def kept(self, number: int) -> object:
        """Returns micro-batch `number` of the step. Draws it if no chunk has drawn it before."""
        while number >= len(self.sample_ids):
            batch = next(self)
            self._kept[len(self.sample_ids) - 1] = batch
        return self._kept[number]

    def drop_drawn(self) -> None:
        """Drops the micro-batches that all chunks have drawn."""
        slowest = min(chunk.drawn for chunk in self._chunks)
        for number in [number for number in self._kept if number < slowest]:
            del self._kept[number]

    @property
    def rng_position(self) -> RngPosition:
        """Position of the last drawn micro-batch in the run, for random numbers."""
        return self.rng_position_of(len(self.sample_ids) - 1)

    def rng_position_of(self, index: int) -> RngPosition:
        """Returns the position of micro-batch `index` of the step in the run, for random numbers."""
        first = (index * self.data_parallel_size + self.data_parallel_rank) * self.micro_batch_size
        return RngPosition(self.seed, self.iteration, first)

    def close(self) -> None:
        """Ends the processes that read ahead."""
        close = getattr(self.micro_batches, "close", None)
        if close is not None:
            close()


class ChunkData(Iterator[Any]):
    """An iterator of one of several model chunks, which draws all micro-batches of a step in order, at its own pace."""

    def __init__(self, data: StepData) -> None:
        self.data = data
        self.drawn = 0
        """Number of micro-batches that this chunk has drawn in the current step."""

    def __next__(self) -> Any:
        batch = self.data.kept(self.drawn)
        self.drawn += 1
        self.data.drop_drawn()
        return batch

    @property
    def iteration(self) -> int:
        """Number of steps before the current one."""
        return self.data.iteration

    @property
    def sample_ids(self) -> list[list[int]]:
        """Sample ids of each micro-batch that this chunk has drawn in the current step."""
        return self.data.sample_ids[: self.drawn]

    @property
    def rng_position(self) -> RngPosition:
        """Position in the run of the micro-batch that this chunk drew last, for random numbers."""
        return self.data.rng_position_of(self.drawn - 1)

    def begin(self, iteration: int) -> None:
        """Begins a step for all chunks."""
        self.data.begin(iteration)


def _numbers(sample_ids: Tensor | Sequence[int] | None) -> list[int]:
    if sample_ids is None:
        return []
    return sample_ids.tolist() if isinstance(sample_ids, Tensor) else list(sample_ids)


def is_end_of_data(error: BaseException) -> bool:
    """Whether a schedule raised this error because its data iterator ended. A StopIteration that passes through a
    generator comes out as a RuntimeError."""
    return isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration)


def step_data_of(data: object) -> StepData | None:
    """Returns the StepData that an iterator (or list) of `StepData.iterators` belongs to; None for a script's
    iterator."""
    first = data[0] if isinstance(data, Sequence) and data else data
    first = first.data if isinstance(first, ChunkData) else first
    return first if isinstance(first, StepData) else None


def _out_of_shared_memory(value: Any) -> Any:
    """Returns the value with copies in place of the tensors that a worker sent, because each of those keeps a file
    open."""
    if isinstance(value, Tensor):
        return value.clone() if value.device.type == "cpu" and value.is_shared() else value
    if isinstance(value, dict):
        return {name: _out_of_shared_memory(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_out_of_shared_memory(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **_out_of_shared_memory(fields))
    return value
