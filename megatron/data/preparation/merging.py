"""Merges the workers' shards in the order of the input, while the workers continue."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.data.datasets.index_format import write_index
from megatron.data.preparation.messages import BlockReport, FileEnd, Job, LineFault
from megatron.data.preparation.shards import LENGTHS, ShardPaths, StreamCounts, StreamName

_CHUNK_BYTES = 4 << 20
_NONE = StreamCounts()


@dataclass
class _Block:
    """A finished block: its report, and the position in each of the worker's streams at which its documents begin."""

    report: BlockReport
    starts: dict[StreamName, StreamCounts]
    first_line: int = 0
    """Number of lines of the whole input before this block."""


@dataclass
class OutputCounts:
    """Counts of lines of the input."""

    lines: int = 0
    blank_lines: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    """The first dropped lines, as "file:line: description"."""


class ShardMerger:
    """Takes reports in any order and copies their blocks in the order of the input. Each key has its own output.

    Memory does not grow with the data. With one partition, blocks are copied as soon as possible. With several, the
    parts follow each other in the output, so copying waits until all blocks are finished.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._blocks_of_file = {file.index: job.plan.blocks_of(file) for file in job.plan.files}
        self._waiting: dict[tuple[int, int], _Block] = {}
        self._ends: dict[tuple[int, StreamName], StreamCounts] = {}
        self._next = (0, 0)
        self._first_line_of_file: dict[int, int] = {0: 0}
        self._kept: list[_Block] = []
        self._outputs = [_Output(job, key) for key in range(len(job.keys))]
        self.counts = OutputCounts()
        self.fault: str | None = None
        """The first bad line of the input, as "file:line: description", once all blocks before it are known."""
        self._go_on()  # skips empty files

    @property
    def done(self) -> bool:
        """Whether all blocks of all files are reported."""
        return self._next[0] >= len(self._job.plan.files)

    def take(self, message: BlockReport | FileEnd) -> None:
        """Takes a worker's message, and copies the blocks that are next in order."""
        if isinstance(message, FileEnd):
            self._blocks_of_file[message.file] = message.blocks
        else:
            starts = {stream: self._ends.get((message.worker, stream), _NONE) for stream in message.streams}
            for stream, counts in message.streams.items():
                self._ends[message.worker, stream] = starts[stream] + counts
            self._waiting[message.file, message.block] = _Block(message, starts)
        self._go_on()

    def _go_on(self) -> None:
        while self.fault is None and not self.done and self._advance():
            pass

    def finish(self) -> None:
        """Copies the remaining blocks and writes the indices."""
        assert self.done and self.fault is None
        if self._job.partitions > 1:
            for part in range(self._job.partitions):
                for block in self._kept:
                    self._copy(block, (part - block.first_line) % self._job.partitions)
        for output in self._outputs:
            output.finish()

    def output(self, key: int) -> "_Output":
        """Returns the output of the key with this index."""
        return self._outputs[key]

    def _advance(self) -> bool:
        file, number = self._next
        if self._blocks_of_file[file] is not None and number >= (self._blocks_of_file[file] or 0):
            self._next = (file + 1, 0)
            self._first_line_of_file[file + 1] = self.counts.lines
            return True
        block = self._waiting.pop(self._next, None)
        if block is None:
            return False
        block.first_line = self.counts.lines
        report = block.report
        if report.stopped:
            self.fault = self._where(report, report.faults[0])
            return False
        for fault in report.faults:
            if len(self.counts.examples) < 3:
                self.counts.examples.append(self._where(report, fault))
        self.counts.lines += report.lines
        self.counts.blank_lines += report.blank_lines
        for kind, count in report.dropped.items():
            self.counts.dropped[kind] = self.counts.dropped.get(kind, 0) + count
        if self._job.partitions == 1:
            self._copy(block, 0)
        else:
            self._kept.append(block)
        self._next = (file, number + 1)
        return True

    def _where(self, report: BlockReport, fault: LineFault) -> str:
        line = self.counts.lines - self._first_line_of_file[report.file] + fault.line + 1
        return f"{self._job.plan.files[report.file].path}:{line}: {fault.message}"

    def _copy(self, block: _Block, part: int) -> None:
        for key, output in enumerate(self._outputs):
            stream = StreamName(key, part)
            paths = ShardPaths.of(self._job.folder, block.report.worker, stream)
            output.append(paths, block.starts[stream], block.report.streams[stream])


class _Output:
    """The data set of one key, in the working folder."""

    def __init__(self, job: Job, key: int) -> None:
        self._itemsize = np.dtype(job.dtype).itemsize
        self._dtype = job.dtype
        self.bin_path = job.folder / f"key{key}.bin"
        self.idx_path = job.folder / f"key{key}.idx"
        self._lengths_path = job.folder / f"key{key}.sequences"
        self._documents_path = job.folder / f"key{key}.documents"
        self._bin = open(self.bin_path, "wb")  # noqa: SIM115
        self._lengths = open(self._lengths_path, "wb")  # noqa: SIM115
        self._documents = open(self._documents_path, "wb")  # noqa: SIM115
        self._documents.write(np.zeros(1, "<i8").data)
        self._sha256 = hashlib.sha256()
        self.counts = StreamCounts()

    @property
    def bin_sha256(self) -> str:
        return self._sha256.hexdigest()

    def append(self, paths: ShardPaths, start: StreamCounts, share: StreamCounts) -> None:
        """Copies a block's part of a stream, which begins after `start`."""
        for chunk in _chunks(paths.tokens, start.tokens * self._itemsize, share.tokens * self._itemsize):
            self._sha256.update(chunk)
            self._bin.write(chunk)
        for chunk in _chunks(paths.sequence_lengths, *_bytes_of(start.sequences, share.sequences)):
            self._lengths.write(chunk)
        end = self.counts.sequences
        for chunk in _chunks(paths.document_lengths, *_bytes_of(start.documents, share.documents)):
            ends = end + np.cumsum(np.frombuffer(chunk, LENGTHS), dtype="<i8")
            self._documents.write(ends.data)
            end = int(ends[-1])
        self.counts += share

    def finish(self) -> None:
        for file in (self._bin, self._lengths, self._documents):
            file.close()
        write_index(
            self.idx_path,
            self._dtype,
            _mapped(self._lengths_path, "<i4"),
            _mapped(self._documents_path, "<i8"),
        )


def _bytes_of(start: int, count: int) -> tuple[int, int]:
    return start * LENGTHS.itemsize, count * LENGTHS.itemsize


def _chunks(path: Path, start: int, count: int) -> Iterator[bytes]:
    """Yields the bytes `start` to `start + count - 1` of a file, in chunks."""
    if count == 0:
        return
    with open(path, "rb") as file:
        file.seek(start)
        while count > 0:
            chunk = file.read(min(count, _CHUNK_BYTES))
            assert chunk, f"{path} is shorter than its worker reported"
            count -= len(chunk)
            yield chunk


def _mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
