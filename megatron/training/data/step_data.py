"""The micro-batches of a run as the forward step draws them, with their place in the run."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.tokens import RngPosition


class StepData(Iterator[Any]):
    """Hands on the micro-batches of an iterator and remembers, for the step under way, which samples they held.

    One model chunk draws from it directly. The chunks of virtual pipeline stages each draw all micro-batches, at a time
    of their own: from an iterator each (`iterators`).

    Args:
        micro_batches: this rank's micro-batches in order; None: this rank is handed none, and its forward step gets
            None for an iterator, as published scripts have it whose other ranks read and send.
        micro_batch_size, data_parallel_rank, data_parallel_size: which rows of a global batch they are: micro-batch m
            of rank r begins at sample (m * ranks + r) * micro_batch_size of it.
        seed: of dropout.
    """

    def __init__(
        self,
        micro_batches: Iterator[Any] | None,
        *,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        seed: int = 1234,
    ) -> None:
        self.micro_batches = micro_batches
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.seed = seed
        self.iteration = 0
        self.sample_ids: list[Any] = []
        """Ids of the samples of each micro-batch drawn since `begin`; empty entries where a batch carries none."""
        self._chunks: tuple[ChunkData, ...] = ()
        self._kept: dict[int, Any] = {}
        """Micro-batches of the step by number, until every chunk has drawn them."""

    def begin(self, iteration: int) -> None:
        """A new step: `iteration` steps were done before it."""
        numbers = {chunk.drawn for chunk in self._chunks if chunk.drawn}  # a script's chunk may draw nothing at all
        assert len(numbers) < 2, f"chunks drew different numbers of micro-batches in a step: {sorted(numbers)}"
        for chunk in self._chunks:
            chunk.drawn = 0
        self._kept.clear()
        self.iteration = iteration
        self.sample_ids = []

    def iterators(self, num_chunks: int) -> list[Any]:
        """What each of this rank's model chunks draws from; earlier ones end."""
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
        batch = next(self.micro_batches)
        ids = getattr(batch, "sample_ids", None)
        self.sample_ids.append([] if ids is None else ids)
        return batch

    def kept(self, number: int) -> Any:
        """Micro-batch `number` of the step, drawn now if no chunk has drawn it before."""
        while number >= len(self.sample_ids):
            batch = next(self)
            self._kept[len(self.sample_ids) - 1] = batch
        return self._kept[number]

    def let_go(self) -> None:
        """Keep no longer what every chunk has drawn."""
        slowest = min(chunk.drawn for chunk in self._chunks)
        for number in [number for number in self._kept if number < slowest]:
            del self._kept[number]

    @property
    def place(self) -> RngPosition:
        """Where the micro-batch that was drawn last stands in the run."""
        return self.place_of(len(self.sample_ids) - 1)

    def place_of(self, index: int) -> RngPosition:
        """Where micro-batch number `index` of the step stands in the run."""
        first = (index * self.data_parallel_size + self.data_parallel_rank) * self.micro_batch_size
        return RngPosition(self.seed, self.iteration, first)

    def close(self) -> None:
        """End the processes that read ahead."""
        close = getattr(self.micro_batches, "close", None)
        if close is not None:
            close()


class ChunkData(Iterator[Any]):
    """The micro-batches of a step as one of several model chunks draws them: all of them, in order, at its own pace."""

    def __init__(self, data: StepData) -> None:
        self.data = data
        self.drawn = 0
        """Micro-batches that this chunk has drawn in the step under way."""

    def __next__(self) -> Any:
        batch = self.data.kept(self.drawn)
        self.drawn += 1
        self.data.let_go()
        return batch

    @property
    def iteration(self) -> int:
        """Steps done before the one under way."""
        return self.data.iteration

    @property
    def sample_ids(self) -> list[Any]:
        """Ids of the samples of each micro-batch that this chunk has drawn in the step under way."""
        return self.data.sample_ids[: self.drawn]

    @property
    def place(self) -> RngPosition:
        """Where the micro-batch that this chunk drew last stands in the run."""
        return self.data.place_of(self.drawn - 1)

    def begin(self, iteration: int) -> None:
        """A new step, for all chunks."""
        self.data.begin(iteration)


def step_data_of(data: Any) -> StepData | None:
    """What `StepData.iterators` gave (one iterator or a list) belongs to; None for a script's own iterator."""
    first = data[0] if isinstance(data, Sequence) and data else data
    first = first.data if isinstance(first, ChunkData) else first
    return first if isinstance(first, StepData) else None
