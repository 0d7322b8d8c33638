"""Iterators over micro-batches, which worker processes read ahead.

The sampler alone decides the order. Workers read whole micro-batches in turn, and their results are put in order again,
so the number of workers does not change the data.
"""

import contextlib
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from megatron.core.exceptions import UserError
from megatron.data.datasets.object_store import StoreError
from megatron.training.data.balanced_batches import BalancedSampler
from megatron.training.data.batch import collate_gpt
from megatron.training.data.regrouped_batches import (
    RegroupedDocuments,
    RegroupedRows,
    RegroupedSampler,
    Regrouping,
    only_item,
)
from megatron.training.data.samplers import CyclicSampler, DataParallelShard, MegatronCyclicSampler, SequentialSampler
from megatron.training.launch.process_state import kill_if_stopped, process_state
from megatron.training.launch.signals import shield_worker

DataloaderType = Literal["single", "cyclic", "external"]


_LOOK_SECONDS = 5.0
"""Seconds between two checks of the workers. A worker that is stopped at two checks in a row is ended. A worker checks
its training process as often."""


BUS_ERROR = (
    "a bus error of a data worker: a mapped index (.idx, or .npy of the index cache) became shorter or its disk "
    "failed, or shared memory (/dev/shm) is full; tools/inspect_data.py checks data sets"
)
"""Likely causes, which torch's message about a worker that was killed by SIGBUS does not name."""


class WorkerStopped(RuntimeError):
    """A process that reads data was stopped by a signal, and would never send another micro-batch."""


class WorkerCrashed(RuntimeError):
    """A process that reads data was killed by a bus error."""


_ended: set[int] = set()
"""Process ids of workers that were ended because they were stopped."""


def error_of_worker(error: BaseException) -> WorkerStopped | WorkerCrashed | None:
    """Returns the error that says why a worker ended, in place of torch's error, which does not; None for other errors.

    torch raises its error as soon as a worker ends, wherever the main thread is: a run may get it outside of the
    iterator.
    """
    if "killed by signal: Bus error" in str(error):
        return WorkerCrashed(BUS_ERROR)
    named = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", str(error))
    stopped = _ended.intersection(map(int, named[1].split(","))) if named else ()
    if not stopped:
        return None
    return WorkerStopped(
        f"the data worker with process id {min(stopped)} was stopped by a signal (SIGSTOP or SIGTSTP) for more than "
        f"{_LOOK_SECONDS:g} s"
    )


class SampleError(RuntimeError):
    """A sample cannot be read. The message names its id and the cause."""


class DamagedSample(SampleError, UserError):
    """A sample cannot be read because its files are damaged or gone; a restart does not help. If an object store does
    not answer, the error is a plain SampleError, because a restart may help."""


class MicroBatchIterator(Iterator[Any]):
    """One pass over micro-batches. The workers end after `close`, at the end of the pass, and at the program's end.
    With `restarts` the workers outlive the pass, so that `restart` begins another one."""

    def __init__(self, loader: "DataLoader[Any]", restarts: bool = False) -> None:
        self._loader = loader if restarts else None
        self._drawn = False
        try:
            self._iterator: Iterator[Any] | None = iter(loader)
        except OSError as error:
            raise UserError(
                f"--num-workers {loader.num_workers}: the system cannot start another process ({error.strerror}); give "
                "fewer"
            ) from None
        self._workers: Sequence[Any] = getattr(self._iterator, "_workers", ())
        self._closed = threading.Event()
        if self._workers:
            threading.Thread(target=self._watch_workers, name="data-workers", daemon=True).start()

    def __next__(self) -> object:
        if self._iterator is None:
            raise StopIteration
        self._drawn = True
        try:
            return self._read(self._iterator)
        except DamagedSample as error:
            self.close()  # torch puts the traceback of a worker before the message
            raise DamagedSample(str(error).strip().rpartition(f"{DamagedSample.__name__}: ")[2]) from None
        except BaseException as error:
            self.close()
            explained = error_of_worker(error)
            if explained is not None:
                raise explained from error
            raise

    def _read(self, iterator: Iterator[Any]) -> object:
        try:
            return next(iterator)
        except (OSError, EOFError):
            # A worker that ends takes tensors with it that it has announced already. Its end is signalled a moment
            # later, and torch raises the error that names it.
            time.sleep(1.0)
            raise

    def _watch_workers(self) -> None:
        """Ends workers that stay stopped, because torch waits for them forever, also inside a read. It looks twice:
        when a terminal suspends a run, all its processes are stopped, and later they continue one after the other."""
        before: set[int] = set()
        while not self._closed.wait(_LOOK_SECONDS):
            stopped = {worker.pid for worker in self._workers if process_state(worker.pid) == "stopped"}
            for pid in stopped & before:
                _ended.add(pid)
                kill_if_stopped(pid)
            before = stopped

    def restart(self) -> None:
        """Goes back to the first micro-batch. No effect without `restarts`, and after `close`."""
        if self._loader is not None and self._iterator is not None and self._drawn:
            self._iterator, self._drawn = iter(self._loader), False

    def close(self) -> None:
        """Ends the workers and the iterator."""
        # torch does this when the last reference is dropped, but a traceback may keep one for long.
        self._closed.set()
        for worker in self._workers:
            kill_if_stopped(worker.pid)  # torch's SIGTERM does not reach it, and the program would wait for it
        # A worker that is told to end may crash instead, in its C++ threads. It has no samples left to give.
        with contextlib.suppress(RuntimeError):
            getattr(self._iterator, "_shutdown_workers", lambda: None)()
        self._iterator, self._workers = None, ()

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
    collate: Callable[[Sequence[Any]], object] = collate_gpt,
    pin_memory: bool = False,
    multiprocessing_context: str | None = None,
    restarts: bool = False,
    batch_sizes: Iterable[int] | None = None,
    regrouping: Regrouping | None = None,
) -> Iterator[Any]:
    """Returns an iterator over this rank's micro-batches, which begins after `consumed_samples` samples of the run.

    Args:
        dataset: items by id; for `external`, an iterable of batches.
        num_workers: processes that read ahead; 0: this process reads.
        dataloader_type: `single`: the dataset's order, once; `cyclic`: endless shuffled epochs; `external`: the user's
            own loader.
        seed: seed of the cyclic order.
        fill_to: for `single`: fill the last batch up to a multiple of this (SequentialSampler).
        megatron_cyclic_order, data_sharding: for `cyclic`: use MegatronCyclicSampler.
        collate: makes a batch from a list of items.
        pin_memory: put batches into page-locked memory.
        multiprocessing_context: start method of workers (`fork`, `spawn`, `forkserver`); None: Python's default.
        restarts: the iterator's `restart` goes back to its first micro-batch. A user's own loader cannot do that.
        batch_sizes: sizes of the global batches, whose rows BalancedSampler puts in order; None: the order of the
            dataset.
        regrouping: RegroupedSampler makes the micro-batches of these global batches instead, and `collate` is not used.

    Raises UserError if no samples are left. The iterator raises SampleError if a sample cannot be read, and
    DamagedSample, a UserError too, if its files are damaged.
    """
    if dataloader_type == "external":
        if not isinstance(dataset, Iterable):
            raise UserError(f"--dataloader-type external: {type(dataset).__name__} is not an iterable of batches")
        return iter(dataset)
    shard = own = DataParallelShard(micro_batch_size, data_parallel_rank, data_parallel_size)
    if batch_sizes is not None:
        shard = DataParallelShard(1)
    sampler: Iterable[list[int | None]]
    if dataloader_type == "single":
        sampler = SequentialSampler(len(dataset), consumed_samples, shard, fill_to)
    elif dataloader_type == "cyclic" and megatron_cyclic_order:
        sampler = MegatronCyclicSampler(len(dataset), consumed_samples, shard, data_sharding)
    elif dataloader_type == "cyclic":
        sampler = CyclicSampler(len(dataset), consumed_samples, shard, seed)
    else:
        raise UserError(f"--dataloader-type {dataloader_type}: expected single, cyclic or external")
    rows: Dataset[object] = _NamingErrors(dataset)
    micro_batches: Iterable[list[int | None]] | Iterable[list[RegroupedDocuments]] = sampler
    if batch_sizes is not None and regrouping is not None:
        micro_batches = RegroupedSampler(sampler, batch_sizes, dataset, regrouping)
        rows, collate = RegroupedRows(_NamingErrors(dataset), regrouping.multiple), only_item
    elif batch_sizes is not None:
        micro_batches = BalancedSampler(sampler, batch_sizes, dataset, own)
    with warnings.catch_warnings():  # `setup.notes` prints a note with the flag's name
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader[Any] = DataLoader(
            rows,
            batch_sampler=micro_batches,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            worker_init_fn=partial(_start_worker, os.getpid(), _LOOK_SECONDS) if num_workers else None,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            persistent_workers=restarts and num_workers > 0,
            # The loader draws a seed for its workers. Its own generator keeps the global random state unchanged.
            generator=torch.Generator(),
        )
    return MicroBatchIterator(loader, restarts)


class _NamingErrors(Dataset[Any]):
    """The dataset, with the sample's id added to errors."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, idx: int | None) -> Any:
        try:
            return self._dataset[idx]
        except StoreError as error:
            raise SampleError(f"sample {idx}: {error}") from error
        except UserError as error:
            raise DamagedSample(f"sample {idx}: {error}") from error
        except Exception as error:
            raise SampleError(f"sample {idx}: {type(error).__name__}: {error}") from error


def _start_worker(training_process: int, seconds: float, worker_id: int) -> None:
    shield_worker()
    threading.Thread(target=_end_with, args=(training_process, seconds), name="training-process", daemon=True).start()


def _end_with(training_process: int, seconds: float) -> None:
    """Ends this worker after a training process that was killed. torch's workers look for it only between two reads,
    and wait forever for a full pipe to it."""
    while process_state(training_process) != "ended":
        time.sleep(seconds)
    os._exit(1)
