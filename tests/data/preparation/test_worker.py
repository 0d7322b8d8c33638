"""A worker, run in this process: blocks to shards and reports."""

import multiprocessing
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.data.preparation.messages import BlockReport, Failure, Job, Shared, block_number
from megatron.data.preparation.shards import ShardPaths, StreamCounts, StreamName
from megatron.data.preparation.worker import run_worker

STREAM = StreamName(0, 0)


@pytest.fixture(autouse=True)
def keep_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a worker changes them for its process
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)


def work(job: Job, stop_from: int = 1 << 60) -> tuple[list[Any], Shared]:
    """Messages of one worker that does everything."""
    shared = Shared(multiprocessing.Value("l", 0), SimpleNamespace(value=stop_from), [0, 0, 0])
    ours, theirs = multiprocessing.Pipe()
    run_worker(0, job, shared, theirs)
    messages = []
    try:
        while True:
            messages.append(ours.recv())
    except EOFError:
        return messages, shared


def tokens(job: Job, stream: StreamName = STREAM) -> list[int]:
    return np.fromfile(ShardPaths.of(job.folder, 0, stream).tokens, job.dtype).tolist()


def test_every_block_gives_a_report_and_documents(make_job: Callable[..., Job]) -> None:
    job = make_job([{"text": "1 2"}, b"  ", {"text": "3"}], [{"text": "4"}])
    (first, second), shared = work(job)
    assert (first.file, first.block, first.lines, first.blank_lines) == (0, 0, 3, 1)
    assert (second.file, second.lines) == (1, 1)
    assert first.streams == {STREAM: StreamCounts(2, 2, 3)} and second.streams == {STREAM: StreamCounts(1, 1, 1)}
    assert tokens(job) == [1, 2, 3, 4]
    assert shared.progress == [job.plan.total_bytes, 3, 4]


def test_a_bad_line_stops_the_work_on_later_blocks(make_job: Callable[..., Job]) -> None:
    job = make_job([{"text": "1"}, b"{", {"text": "3"}], [{"text": "4"}])
    (report,), shared = work(job)
    assert report.stopped and [(fault.line, fault.fault) for fault in report.faults] == [(1, "not JSON")]
    assert shared.stop_from.value == block_number(0, 0)


def test_blocks_after_a_stop_are_not_read(make_job: Callable[..., Job]) -> None:
    job = make_job([{"text": "1"}], [{"text": "2"}])
    messages, _ = work(job, stop_from=block_number(1, 0))
    assert [message.file for message in messages if isinstance(message, BlockReport)] == [0]


def test_errors_are_sent_to_the_parent(make_job: Callable[..., Job]) -> None:
    job = make_job([{"text": "1"}])
    ((failure,), _) = work(make_job(folder=job.folder / "missing", plan=job.plan))
    assert isinstance(failure, Failure) and failure.expected and "missing" in failure.message
    broken = make_job(plan=job.plan)
    object.__setattr__(broken, "keys", None)
    ((failure,), _) = work(broken)
    assert not failure.expected and "Traceback" in failure.message
