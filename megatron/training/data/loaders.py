"""Iterators over a run's micro-batches, read ahead by worker processes.

The order comes from the sampler alone: workers are handed whole micro-batches in turn and their results are put back in
order, so the number of workers does not show.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from megatron.core.exceptions import UserError
from megatron.training.data.batch import collate_gpt
from megatron.training.data.samplers import CyclicSampler, MegatronCyclicSampler, RankShare, SequentialSampler
from megatron.training.launch.signals import shield_worker

DataloaderType = Literal["single", "cyclic", "external"]


class SampleError(RuntimeError):
    """A sample could not be read; the message names its id and the cause."""


class MicroBatchIterator(Iterator[Any]):
    """One pass over micro-batches. `close` ends the workers; so does the end of the pass, or of the program."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._iterator: Iterator[Any] | None = iter(loader)

    def __next__(self) -> Any:
        if self._iterator is None:
            raise StopIteration
        try:
            return next(self._iterator)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers. The iterator then has nothing more."""
        # Torch does this itself when the last reference goes, but a traceback may hold one for long.
        getattr(self._iterator, "_shutdown_workers", lambda: None)()
        self._iterator = None

    def __enter__(self) -> "MicroBatchIterator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_data_iterator(
    dataset: Any,
    *,
    micro_batch_size: int,
    consumed_samples: int = 0,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    num_workers: int = 2,
    dataloader_type: DataloaderType = "single",
    seed: int = 1234,
    fill_to: int | None = None,
    megatron_cyclic_order: bool = False,
    data_sharding: bool = True,
    collate: Callable[[Sequence[Any]], Any] = collate_gpt,
    pin_memory: bool = False,
    multiprocessing_context: str | None = None,
) -> Iterator[Any]:
    """This rank's micro-batches of a dataset from sample `consumed_samples` of the run on.

    Args:
        dataset: items by id; what `external` passes through is an iterable of batches.
        num_workers: processes that read ahead; 0: the calling process reads.
        dataloader_type: `single`: in the dataset's order, once; `cyclic`: shuffled epochs without end; `external`: the
            user's own loader.
        seed: of the cyclic order.
        fill_to: for `single`: fill the last batch up to a multiple of so many samples (SequentialSampler).
        megatron_cyclic_order, data_sharding: for `cyclic`: see MegatronCyclicSampler.
        collate: makes a batch of a list of items.
        pin_memory: batches in page-locked memory.
        multiprocessing_context: how workers start (`fork`, `spawn`, `forkserver`); None: Python's default.

    Raises UserError when no sample is left; SampleError from the iterator when a sample cannot be read.
    """
    if dataloader_type == "external":
        if not isinstance(dataset, Iterable):
            raise UserError(f"--dataloader-type external: {type(dataset).__name__} is not an iterable of batches")
        return iter(dataset)
    share = RankShare(micro_batch_size, data_parallel_rank, data_parallel_size)
    sampler: Iterable[list[int | None]]
    if dataloader_type == "single":
        sampler = SequentialSampler(len(dataset), consumed_samples, share, fill_to)
    elif dataloader_type == "cyclic" and megatron_cyclic_order:
        sampler = MegatronCyclicSampler(len(dataset), consumed_samples, share, data_sharding)
    elif dataloader_type == "cyclic":
        sampler = CyclicSampler(len(dataset), consumed_samples, share, seed)
    else:
        raise UserError(f"--dataloader-type {dataloader_type}: expected single, cyclic or external")
    with warnings.catch_warnings():  # the notes of a run say it in our words (`setup.notes`)
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader[Any] = DataLoader(
            _NamingErrors(dataset),
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            worker_init_fn=_start_worker if num_workers else None,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            # The loader draws a seed for its workers; from a generator of its own, lest it disturb the run's.
            generator=torch.Generator(),
        )
    return MicroBatchIterator(loader)


class _NamingErrors(Dataset[Any]):
    """The dataset, with every error saying at which sample it came."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, idx: int | None) -> Any:
        try:
            return self._dataset[idx]
        except Exception as error:
            raise SampleError(f"sample {idx}: {type(error).__name__}: {error}") from error


def _start_worker(worker_id: int) -> None:
    shield_worker()
