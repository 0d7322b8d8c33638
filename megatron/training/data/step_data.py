"""The micro-batches of a run as the forward step draws them, with their place in the run."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from megatron.core.tokens import RandomPlace


class StepData(Iterator[Any]):
    """Hands on the micro-batches of an iterator and remembers, for the step under way, which samples they held.

    Args:
        micro_batches: this rank's micro-batches in order.
        micro_batch_size, data_parallel_rank, data_parallel_size: which rows of a global batch they are: micro-batch m
            of rank r begins at sample (m * ranks + r) * micro_batch_size of it.
        seed: of dropout.
    """

    def __init__(
        self,
        micro_batches: Iterator[Any],
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

    def begin(self, iteration: int) -> None:
        """A new step: `iteration` steps were done before it."""
        self.iteration = iteration
        self.sample_ids = []

    def __next__(self) -> Any:
        batch = next(self.micro_batches)
        ids = getattr(batch, "sample_ids", None)
        self.sample_ids.append([] if ids is None else ids)
        return batch

    @property
    def place(self) -> RandomPlace:
        """Where the micro-batch that was drawn last stands in the run."""
        return self.place_of(len(self.sample_ids) - 1)

    def place_of(self, index: int) -> RandomPlace:
        """Where micro-batch number `index` of the step stands in the run."""
        first = (index * self.data_parallel_size + self.data_parallel_rank) * self.micro_batch_size
        return RandomPlace(self.seed, self.iteration, first)

    def close(self) -> None:
        """End the processes that read ahead."""
        close = getattr(self.micro_batches, "close", None)
        if close is not None:
            close()


def tell_place(model: Sequence[nn.Module], data: StepData, number: int) -> None:
    """Before micro-batch `number` of a step: tell the chunks that want to know where it stands in the run."""
    for chunk in model:
        inner: Any = chunk
        while not hasattr(inner, "set_random_place") and hasattr(inner, "module"):
            inner = inner.module
        if hasattr(inner, "set_random_place"):
            inner.set_random_place(data.place_of(number))
