"""A worker process: encodes blocks of the input into its own shards, and sends only counts."""

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection

from megatron.core.exceptions import UserError
from megatron.data.preparation.batches import DocumentBatch
from megatron.data.preparation.blocks import LineReader, WorkItem
from megatron.data.preparation.inputs import InputFile
from megatron.data.preparation.json_lines import BadLine, texts_of_line
from megatron.data.preparation.messages import BlockReport, Failure, FileEnd, Job, LineFault, Shared, block_number
from megatron.data.preparation.readers import GroupReader, open_groups
from megatron.data.preparation.shards import ShardPaths, StreamName, StreamWriter

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BATCH_BYTES = 1 << 20
_EXAMPLES = 3


def run_worker(number: int, job: Job, shared: Shared, connection: Connection) -> None:
    """Runs a worker process. Errors are sent to the parent as `Failure`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with ExitStack() as stack:
            writers = {
                stream: stack.enter_context(
                    StreamWriter(ShardPaths.of(job.folder, job.first_worker + number, stream), job.dtype)
                )
                for stream in job.streams
            }
            _Worker(number, job, shared, connection, writers).work()
    except BrokenPipeError:
        pass  # the parent has ended
    except UserError as error:
        connection.send(Failure(str(error), expected=True))
    except OSError as error:
        connection.send(Failure(f"{error.filename or job.folder.parent}: {error.strerror}", True, True))
    except MemoryError:
        connection.send(Failure("out of memory; use fewer --workers or a smaller --max-line-bytes", True, True))
    except Exception:
        connection.send(Failure(traceback.format_exc(), expected=False))
    finally:
        connection.close()


class _Worker:
    def __init__(
        self,
        number: int,
        job: Job,
        shared: Shared,
        connection: Connection,
        writers: dict[StreamName, StreamWriter],
    ) -> None:
        self._number = number
        self._job = job
        self._shared = shared
        self._connection = connection
        self._writers = writers
        self._split = None if job.splitter is None else job.splitter.split

    def work(self) -> None:
        for item in self._work_items():
            if self._is_wanted(item, item.first_block) and not self._is_done(item):
                with self._open(item.file) as reader:
                    self._do_item(item, reader)

    def _work_items(self) -> Iterator[WorkItem]:
        work_items = self._job.plan.work_items
        while True:
            with self._shared.next_work_item.get_lock():
                index = self._shared.next_work_item.value
                self._shared.next_work_item.value += 1
            if index >= len(work_items):
                return
            yield work_items[index]

    def _open(self, file: InputFile) -> LineReader | GroupReader:
        if file.has_groups:
            return open_groups(file, self._job.keys, self._job.longest_line, self._job.separator)
        return LineReader(file, self._job.longest_line)

    def _is_done(self, item: WorkItem) -> bool:
        """Whether an earlier run has finished all blocks of the item."""
        end = self._job.ends.get(item.file.index) if item.blocks is None else item.first_block + item.blocks
        return end is not None and all(
            (item.file.index, block) in self._job.done for block in range(item.first_block, end, item.step)
        )

    def _is_wanted(self, item: WorkItem, block: int) -> bool:
        return block_number(item.file.index, block) < self._shared.stop_from.value

    def _want_no_more(self, report: BlockReport) -> None:
        """Stops the work on later blocks. Earlier blocks continue: they may contain a bad line that comes first."""
        with self._shared.next_work_item.get_lock():
            place = block_number(report.file, report.block)
            self._shared.stop_from.value = min(self._shared.stop_from.value, place)

    def _do_item(self, item: WorkItem, reader: LineReader | GroupReader) -> None:
        size = self._job.plan.block_bytes
        block = item.first_block
        while item.blocks is None or block < item.first_block + item.blocks * item.step:
            if not self._is_wanted(item, block):
                return
            if (item.file.index, block) in self._job.done:
                block += item.step
                continue
            if isinstance(reader, LineReader):
                reader.seek_line(block * size)
                if item.blocks is None and reader.ended and reader.position <= block * size:
                    self._connection.send(FileEnd(item.file.index, -(-reader.position // size)))
                    return
            report = self._do_block(item, block, reader)
            if report.stopped:
                self._want_no_more(report)
            self._connection.send(report)
            block += item.step

    def _do_block(self, item: WorkItem, block: int, reader: LineReader | GroupReader) -> BlockReport:
        report = BlockReport(self._job.first_worker + self._number, item.file.index, block)
        batches = [DocumentBatch(part, self._job, self._writers) for part in range(self._job.partitions)]
        read_before = reader.bytes_read
        if isinstance(reader, LineReader):
            lines = reader.lines_before((block + 1) * self._job.plan.block_bytes)
        else:
            lines = reader.lines_of_group(block)
        for line in lines:
            number = report.lines
            report.lines += 1
            batch = batches[number % self._job.partitions]
            try:
                if line is None:
                    raise BadLine("too long", f"longer than --max-line-bytes {self._job.longest_line}")
                if not line.strip():
                    report.blank_lines += 1
                    continue
                batch.add(number, texts_of_line(line, self._job.keys, self._split), len(line))
            except BadLine as error:
                if self._drop(report, LineFault(number, error.fault, error.message)):
                    break
            if batch.bytes >= _BATCH_BYTES:
                self._flush(batch, report)
                read_before = self._tell_progress(item, reader, read_before)
                if report.stopped:
                    break
        for batch in batches:
            self._flush(batch, report)
        self._tell_progress(item, reader, read_before)
        report.faults = sorted(report.faults, key=lambda fault: fault.line)[:_EXAMPLES]
        for stream, writer in self._writers.items():
            report.streams[stream], report.checksums[stream] = writer.end_block()
        return report

    def _drop(self, report: BlockReport, fault: LineFault) -> bool:
        """Records a bad line. Returns whether the work stops."""
        report.dropped[fault.fault] += 1
        report.faults.append(fault)
        report.stopped = self._job.on_error == "stop"
        return report.stopped

    def _flush(self, batch: DocumentBatch, report: BlockReport) -> None:
        for fault in batch.flush():
            self._drop(report, fault)

    def _tell_progress(self, item: WorkItem, reader: LineReader | GroupReader, read_before: int) -> int:
        """Updates the progress that the parent shows. Workers that read the same compressed file each count a share of
        it."""
        read = reader.bytes_read
        base = 3 * self._number
        progress = self._shared.progress
        progress[base] += (read - read_before) // (item.step if item.blocks is None else 1)
        progress[base + 1] = sum(writer.counts.documents for writer in self._writers.values()) // len(self._job.keys)
        progress[base + 2] = sum(writer.counts.tokens for writer in self._writers.values())
        return read
