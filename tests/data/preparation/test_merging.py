"""Shards of workers become one output, in the order of the input."""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.preparation.blocks import Plan
from megatron.data.preparation.inputs import InputFile
from megatron.data.preparation.merging import ShardMerger
from megatron.data.preparation.messages import BlockReport, FileEnd, Job, LineFault
from megatron.data.preparation.shards import ShardPaths, StreamName, StreamWriter, frame_documents
from megatron.data.tokenizer.base import pack_ids


def plan(*blocks: int | None) -> Plan:
    """Files of so many blocks of one byte; None: a compressed file."""
    files = (
        InputFile(i, f"file{i}", count or 0, "gzip" if count is None else "plain") for i, count in enumerate(blocks)
    )
    return Plan(tuple(files), (), 1)


class Worker:
    """Writes blocks of one-token documents, one for each line; a line belongs to part number modulo partitions."""

    def __init__(self, number: int, job: Job, stack: ExitStack) -> None:
        self.number, self.job = number, job
        self.writers = {
            stream: stack.enter_context(StreamWriter(ShardPaths.of(job.folder, number, stream), job.dtype))
            for stream in job.streams
        }

    def report(self, file: int, block: int, *ids: int, **fields: object) -> BlockReport:
        for part in range(self.job.partitions):
            mine = ids[part :: self.job.partitions]
            writer = self.writers[StreamName(0, part)]
            writer.append(frame_documents(pack_ids([[i] for i in mine]), np.ones(len(mine), np.int64), None), 0)
        report = BlockReport(self.number, file, block, lines=len(ids), **fields)
        for stream, writer in self.writers.items():
            report.streams[stream], report.checksums[stream] = writer.end_block()
        return report


def output(merger: ShardMerger) -> list[int]:
    """All documents of the first key, read as a data set."""
    merger.finish()
    paths = merger.output(0)
    prefix = paths.bin_path.with_suffix("")
    dataset = IndexedDataset(str(prefix))
    return [int(dataset[i][0]) for i in range(len(dataset))]


def test_blocks_are_copied_in_the_order_of_the_input(make_job: Callable[..., Job]) -> None:
    job = make_job(plan=plan(2, 0, 1))
    with ExitStack() as stack:
        a, b = Worker(0, job, stack), Worker(1, job, stack)
        merger = ShardMerger(job)
        merger.take(a.report(2, 0, 5))
        merger.take(a.report(0, 0, 1, 2))
        assert not merger.done and merger.output(0).counts.documents == 2
        merger.take(b.report(0, 1, 3, 4))
        assert merger.done and merger.counts.lines == 5
        assert output(merger) == [1, 2, 3, 4, 5]


def test_the_end_of_a_compressed_file_may_come_late(make_job: Callable[..., Job]) -> None:
    job = make_job(plan=plan(None, 1))
    with ExitStack() as stack:
        worker, merger = Worker(0, job, stack), ShardMerger(job)
        merger.take(worker.report(1, 0, 3))
        merger.take(worker.report(0, 0, 1))
        merger.take(worker.report(0, 1, 2))
        assert not merger.done
        merger.take(FileEnd(0, 2))
        assert merger.done and output(merger) == [1, 2, 3]


def test_parts_follow_each_other_across_blocks(make_job: Callable[..., Job]) -> None:
    """Line i of the whole input belongs to part i modulo the number of parts, also in a block with an odd start."""
    job = make_job(plan=plan(2), partitions=2)
    with ExitStack() as stack:
        worker, merger = Worker(0, job, stack), ShardMerger(job)
        merger.take(worker.report(0, 0, 0, 1, 2))
        merger.take(worker.report(0, 1, 3, 4, 5))
        assert output(merger) == [0, 2, 4, 1, 3, 5]


def test_a_bad_line_is_placed_once_all_blocks_before_it_are_known(make_job: Callable[..., Job]) -> None:
    job = make_job(plan=plan(2, 1))
    with ExitStack() as stack:
        worker, merger = Worker(0, job, stack), ShardMerger(job)
        merger.take(worker.report(0, 1, faults=[LineFault(1, "not JSON", "bad")], stopped=True))
        assert merger.fault is None
        merger.take(worker.report(0, 0, 1, 2, 3))
        assert merger.fault == "file0:5: bad"


def test_skipped_lines_are_counted_with_examples(make_job: Callable[..., Job]) -> None:
    job = make_job(plan=plan(1, 1))
    with ExitStack() as stack:
        worker, merger = Worker(0, job, stack), ShardMerger(job)
        faults = [LineFault(n, "not JSON", f"bad {n}") for n in range(2)]
        for file in (1, 0):
            report = worker.report(file, 0, 1, 2, 3, blank_lines=1, faults=faults)
            report.dropped["not JSON"] = 2
            merger.take(report)
        assert merger.counts.dropped == {"not JSON": 4} and merger.counts.blank_lines == 2
        assert merger.counts.examples == ["file0:1: bad 0", "file0:2: bad 1", "file1:1: bad 0"]


def test_the_digest_is_that_of_the_file(make_job: Callable[..., Job]) -> None:
    job = make_job(plan=plan(1))
    with ExitStack() as stack:
        worker, merger = Worker(0, job, stack), ShardMerger(job)
        merger.take(worker.report(0, 0, 1, 2))
        merger.finish()
    written = merger.output(0)
    assert written.bin_sha256 == hashlib.sha256(written.bin_path.read_bytes()).hexdigest()
