"""megatron/training/data/loaders.py: the run's samples do not depend on layout, workers, or where it was resumed."""

import itertools
import multiprocessing.util
import os
import re
import signal
import time

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.data.datasets.object_store import StoreError
from megatron.training.data import loaders
from megatron.training.data.loaders import DamagedSample, SampleError, build_data_iterator, error_of_worker
from megatron.training.data.step_data import StepData
from megatron.training.launch.process_state import process_state


def fields_of(batch):
    """Everything in a batch, as comparable values."""
    return {name: value.tolist() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}


def samples_of(batches):
    """(id, tokens) of every row."""
    return [
        (sample, row)
        for batch in batches
        for sample, row in zip(batch.sample_ids.tolist(), batch.tokens.tolist(), strict=True)
    ]


def read(dataset, count, **arguments):
    iterator = build_data_iterator(dataset, **arguments)
    batches = list(itertools.islice(iterator, count))
    getattr(iterator, "close", lambda: None)()
    return batches


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
def test_workers_do_not_show(build_dataset, dataloader_type):
    dataset = build_dataset(200, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    found = [
        [
            fields_of(batch)
            for batch in read(
                dataset,
                12,
                micro_batch_size=3,
                consumed_samples=6,
                dataloader_type=dataloader_type,
                num_workers=workers,
            )
        ]
        for workers in (0, 1, 2)
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 12


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
def test_layout_and_resuming_do_not_show(build_dataset, dataloader_type):
    dataset = build_dataset(96)
    expected = samples_of(read(dataset, 96, micro_batch_size=1, dataloader_type=dataloader_type, num_workers=0))
    for micro_batch_size, ranks, start in [(4, 1, 0), (2, 2, 16), (3, 4, 24), (1, 8, 40)]:
        count = (96 - start) // (micro_batch_size * ranks)
        streams = [
            read(
                dataset,
                count,
                micro_batch_size=micro_batch_size,
                consumed_samples=start,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                dataloader_type=dataloader_type,
                num_workers=0,
            )
            for rank in range(ranks)
        ]
        in_order = [batch for step in zip(*streams, strict=True) for batch in step]
        assert samples_of(in_order) == expected[start : start + count * micro_batch_size * ranks]


def test_a_whole_pass_is_filled_up_with_rows_without_loss(build_dataset):
    dataset = build_dataset(21)
    length = len(dataset)
    batches = read(dataset, None, micro_batch_size=4, num_workers=1, fill_to=16)
    assert sum(len(batch.tokens) for batch in batches) == -(-length // 16) * 16
    ids = torch.cat([batch.sample_ids for batch in batches])
    loss = torch.cat([batch.loss_mask for batch in batches]).sum(1)
    assert ids[:length].tolist() == list(range(length))
    assert (ids[length:] == -1).all()
    assert (loss[length:] == 0).all()
    assert (loss[:length] > 0).all()


@pytest.mark.fast("fork")
@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_however_workers_start(build_dataset, method):
    dataset = build_dataset(24)
    dataset[0]
    found = read(dataset, 3, micro_batch_size=4, num_workers=1, multiprocessing_context=method)
    assert samples_of(found) == samples_of(read(dataset, 3, micro_batch_size=4, num_workers=0))


class CrashesAtItsEnd(torch.utils.data.Dataset):
    """Its worker ends by SIGABRT, as a C++ thread that still runs ends it."""

    def __len__(self):
        return 20

    def __getitem__(self, idx):
        if idx == 0:
            multiprocessing.util.Finalize(None, os.abort, exitpriority=1)
        return torch.tensor(idx)


def test_a_worker_that_crashes_at_its_end_ends_no_run():
    found = read(CrashesAtItsEnd(), 3, micro_batch_size=2, num_workers=1, collate=torch.stack)
    assert [batch.tolist() for batch in found] == [[0, 1], [2, 3], [4, 5]]


def test_reading_disturbs_no_generator(build_dataset):
    dataset = build_dataset(24)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for workers in (0, 1):
        read(dataset, 2, micro_batch_size=2, num_workers=workers)
    assert torch.equal(torch.get_rng_state(), before)


class Faulty:
    """Fails to read sample 7."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 20

    def __getitem__(self, idx):
        if idx == 7:
            raise self.error
        return torch.tensor(idx)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (ValueError("the disk is gone"), SampleError, "sample 7: ValueError: the disk is gone"),
        (UserError("docs.bin: was shortened"), DamagedSample, "sample 7: docs.bin: was shortened"),
        # A UserError would end the run with exit code 2, after which tools/launch.py does not start it again.
        (StoreError("s3://b/docs.bin: TimeoutError"), SampleError, "sample 7: s3://b/docs.bin: TimeoutError"),
    ],
    ids=["fault", "damaged file", "store that does not answer"],
)
def test_errors_name_the_sample(error, raised, said, workers):
    iterator = build_data_iterator(Faulty(error), micro_batch_size=2, num_workers=workers, collate=torch.stack)
    assert [next(iterator).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(raised) as caught:
        next(iterator)
    text, is_mistake = str(caught.value), isinstance(caught.value, UserError)
    assert (text == said if is_mistake else said in text) and is_mistake == (raised is DamagedSample)
    with pytest.raises(StopIteration):
        next(iterator)


class Patient:
    """Items that tell the process that reads them, slowly enough for a signal to come between."""

    def __len__(self):
        return 1000

    def __getitem__(self, idx):
        time.sleep(0.01)
        return torch.tensor(os.getpid())


def test_workers_end_with_the_iterator_and_not_with_a_signal():
    others = set(multiprocessing.active_children())  # of tests that shard a pool of processes
    iterator = build_data_iterator(Patient(), micro_batch_size=1, num_workers=2, collate=torch.stack)
    workers = {next(iterator).item() for _ in range(8)}
    assert workers == {process.pid for process in set(multiprocessing.active_children()) - others}
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
        os.kill(worker, signal.SIGINT)
    assert {next(iterator).item() for _ in range(20)} == workers
    iterator.close()
    assert not set(multiprocessing.active_children()) - others
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGSTOP, "was stopped by a signal"), (signal.SIGKILL, "(killed by signal|exited unexpectedly)")],
    ids=["stopped", "killed"],
)
def test_a_worker_that_is_gone_is_an_error(monkeypatch, number, said):
    monkeypatch.setattr(loaders, "_LOOK_SECONDS", 0.2)
    others = set(multiprocessing.active_children())
    iterator = build_data_iterator(Patient(), micro_batch_size=1, num_workers=1, collate=torch.stack)
    worker = next(iterator).item()
    with pytest.raises(RuntimeError) as caught, iterator:  # torch may raise outside of the iterator, too
        os.kill(worker, number)
        list(iterator)
    assert re.search(said, str(error_of_worker(caught.value) or caught.value))
    assert not set(multiprocessing.active_children()) - others


def test_a_stopped_worker_is_named_also_outside_of_the_iterator(monkeypatch):
    """A training step may be running when the worker is ended, and torch raises there."""
    monkeypatch.setattr(loaders, "_LOOK_SECONDS", 0.2)
    with build_data_iterator(Patient(), micro_batch_size=1, num_workers=1, collate=torch.stack) as iterator:
        worker = next(iterator).item()
        with pytest.raises(RuntimeError) as caught:
            os.kill(worker, signal.SIGSTOP)
            time.sleep(60)
        assert str(error_of_worker(caught.value)).startswith(f"the data worker with process id {worker} was stopped by")
    assert error_of_worker(RuntimeError(f"DataLoader worker (pid {worker + 1}) is killed by signal: Killed. ")) is None


class Hanging(Patient):
    """Tells the process that reads, through a pipe, and never returns an item: a file system that hangs."""

    def __init__(self, told):
        self.told = told

    def __getitem__(self, idx):
        self.told.send(os.getpid())
        time.sleep(600)


def test_workers_end_after_a_training_process_that_was_killed(monkeypatch):
    monkeypatch.setattr(loaders, "_LOOK_SECONDS", 0.2)
    heard, told = multiprocessing.Pipe(duplex=False)

    def train():
        next(build_data_iterator(Hanging(told), micro_batch_size=1, num_workers=1))

    training = multiprocessing.get_context("fork").Process(target=train)
    training.start()
    assert heard.poll(60)
    worker = heard.recv()
    assert process_state(worker) == "running"
    training.kill()
    training.join()
    until = time.monotonic() + 30
    while process_state(worker) != "ended" and time.monotonic() < until:
        time.sleep(0.05)
    left = process_state(worker)
    if left != "ended":
        os.kill(worker, signal.SIGKILL)
    assert left == "ended"


def test_the_users_own_loader_passes_through():
    assert list(build_data_iterator([1, 2, 3], micro_batch_size=1, dataloader_type="external")) == [1, 2, 3]
    with pytest.raises(UserError, match="external"):
        build_data_iterator(object(), micro_batch_size=1, dataloader_type="external")
    with pytest.raises(UserError, match="--dataloader-type other"):
        build_data_iterator([1], micro_batch_size=1, dataloader_type="other")


def test_megatron_lm_cyclic_order_on_request(build_dataset):
    dataset = build_dataset(50)
    published = read(
        dataset, 10, micro_batch_size=2, num_workers=0, dataloader_type="cyclic", megatron_cyclic_order=True
    )
    expected = torch.randperm(len(dataset) // 2 * 2, generator=torch.Generator().manual_seed(0))[:20]
    assert torch.cat([batch.sample_ids for batch in published]).tolist() == expected.tolist()


def test_a_step_keeps_no_files_open(build_dataset):
    """A tensor that a worker sends is a shared file. The ids of a step's samples are kept until the log line, which may
    be thousands of micro-batches later."""
    data = StepData(build_data_iterator(build_dataset(400), micro_batch_size=1, num_workers=1), micro_batch_size=1)
    data.begin(0)
    next(data)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        next(data)
    assert data.sample_ids == [[number] for number in range(201)]
    assert len(os.listdir("/proc/self/fd")) < before + 50
    data.close()
