"""Work that survives a kill: a folder beside the output with the shards, and a journal of the finished blocks.

A line of the journal is written after the bytes that it describes. The next run with the same input and settings
verifies these bytes by their checksums, takes over the blocks, and encodes the others.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json
from megatron.data.datasets.object_store import is_url
from megatron.data.preparation.inputs import InputFile
from megatron.data.preparation.messages import BlockReport, FileEnd, LineFault
from megatron.data.preparation.shards import LENGTHS, ShardPaths, StreamCounts, StreamName

VERSION = 1
_CHUNK_BYTES = 4 << 20
_SHARD = re.compile(r"worker(\d+)\.")


def identity_of(files: Sequence[InputFile], settings: dict[str, object]) -> str:
    """Returns a digest of the input files (path, size, time of the last change) and of the settings."""
    inputs = [
        (file.path if is_url(file.path) else os.path.abspath(file.path), file.size, file.modified_ns) for file in files
    ]
    content = json.dumps([VERSION, inputs, settings], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@contextlib.contextmanager
def lock_folder(folder: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Makes the folder and locks it for this process. Raises UserError if another process has the lock.

    A killed process loses its lock. Forked workers do not hold it.
    """
    while True:
        folder.mkdir(exist_ok=True)
        path = folder / "lock"
        with open(path, "wb") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise UserError(
                        f"{folder}: another process is preparing the same data right now; wait until it ends"
                    ) from None
                warn(f"{folder}: cannot be locked ({error.strerror}); start no second run with this output")
            try:  # the process that had the lock may have removed the folder meanwhile
                present = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                present = False
            if present:
                yield
                return


class Unfinished(UserError):
    """An error whose cause is not the input, so that the next run can use the finished work."""


@dataclass
class WorkingFolder:
    """A folder of unfinished work."""

    path: Path
    holds_work: Callable[[], bool] = lambda: True
    """Whether the next run can use what is in the folder."""


@contextlib.contextmanager
def working_folder(output: str, flag: str, ending: str, warn: Callable[[str], None]) -> Iterator[WorkingFolder]:
    """Makes and locks a folder beside the output, so that files can be renamed into place. `ending` is the kind of work
    and its identity. The folder is removed at the end and after an error. After an interruption, a killed worker
    (`Unfinished`) or an error of the system such as a full disk, it stays if it holds work.

    Raises UserError, with the `flag` of the output, for errors of the system."""
    parent, name = Path(output).parent, Path(output).name
    kept = WorkingFolder(parent / f".{name}.{ending}")
    folder, kind = kept.path, ending.partition(".")[0]
    hint = f"the finished part is kept in {folder}: the same command continues from there; or remove the folder"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        left = sorted(path.name for path in parent.glob(f".{glob.escape(name)}.{kind}.*") if path != folder)
        with lock_folder(folder, warn):
            if left:
                warn(
                    f"{parent}: {', '.join(left)}: left by a killed run with other input or flags (then remove it), or "
                    "in use by another run"
                )
            keep = False
            try:
                yield kept
            except (KeyboardInterrupt, SystemExit, OSError, Unfinished) as error:
                keep = kept.holds_work()
                if keep and isinstance(error, OSError):
                    raise UserError(f"{error.filename or folder}: {error.strerror}; {hint}") from None
                if keep and isinstance(error, Unfinished):
                    raise UserError(f"{error}; {hint}") from None
                raise
            finally:
                if not keep:
                    shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{flag} {output}: {error.filename or parent}: {error.strerror}") from None


class Journal:
    """The record of finished blocks in a folder: reads that of earlier runs, and appends to it. A context manager."""

    def __init__(self, folder: Path, dtype: DTypeLike) -> None:
        self._folder = folder
        self._itemsize = np.dtype(dtype).itemsize
        self._path = folder / "journal.jsonl"
        self.block_bytes: int | None = None
        """Size of the blocks in the journal; None if it is new."""
        self.messages: list[BlockReport | FileEnd] = []
        """Messages of earlier runs, in their order."""
        names = (_SHARD.match(path.name) for path in folder.glob("worker*"))
        self.first_worker = 1 + max((int(match[1]) for match in names if match), default=-1)
        """Number of the first worker of this run. Numbers of earlier runs are not used again, because their workers may
        still be writing."""
        valid = self._read()
        self._file: BinaryIO = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._file.truncate(valid)
        self.recorded = bool(self.messages)
        """Whether the journal contains any finished work."""

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self, block_bytes: int) -> None:
        """Records the size of blocks in a new journal."""
        if self.block_bytes is None:
            self._write({"block_bytes": block_bytes})
            self.block_bytes = block_bytes

    def start_workers(self, count: int) -> None:
        """Records that workers start, before they do."""
        self._write({"last_worker": self.first_worker + count - 1})

    def record(self, message: BlockReport | FileEnd) -> None:
        """Records a message of a worker. A block at which the work stops is not recorded."""
        if isinstance(message, FileEnd):
            self._write({"file": message.file, "blocks": message.blocks})
        elif not message.stopped:
            self._write(_record_of(message))
            self.recorded = True

    def _write(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def _read(self) -> int:
        """Reads the lines whose shards are intact. Returns the bytes of these lines."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        valid, intact = 0, True
        positions: dict[tuple[int, StreamName], StreamCounts] = {}
        for line in content.splitlines(keepends=True):
            try:
                record = parse_json(line)
                if "last_worker" in record:
                    self.first_worker = max(self.first_worker, int(record["last_worker"]) + 1)
                elif not intact:
                    continue
                elif self.block_bytes is None:
                    self.block_bytes = int(record["block_bytes"])
                elif "blocks" in record:
                    self.messages.append(FileEnd(record["file"], record["blocks"]))
                else:
                    report = _report_of(record)
                    intact = self._is_intact(report, positions)
                    if intact:
                        self.messages.append(report)
            except (ValueError, KeyError, TypeError):
                intact = False  # the last line of a killed run is cut off
            intact = intact and line.endswith(b"\n")
            valid += len(line) if intact else 0
        return valid

    def _is_intact(self, report: BlockReport, positions: dict[tuple[int, StreamName], StreamCounts]) -> bool:
        """Whether the shards contain the bytes that the worker wrote for this block. Advances `positions` past them."""
        for stream, counts in report.streams.items():
            start = positions.get((report.worker, stream), StreamCounts())
            positions[report.worker, stream] = start + counts
            paths = ShardPaths.of(self._folder, report.worker, stream)
            sizes = (self._itemsize, LENGTHS.itemsize, LENGTHS.itemsize)
            files = (paths.tokens, paths.sequence_lengths, paths.document_lengths)
            starts = (start.tokens, start.sequences, start.documents)
            amounts = (counts.tokens, counts.sequences, counts.documents)
            found = tuple(
                _checksum(path, first * size, amount * size)
                for path, first, amount, size in zip(files, starts, amounts, sizes, strict=True)
            )
            if found != report.checksums[stream]:
                return False
        return True


def _checksum(path: Path, start: int, count: int) -> int | None:
    """Returns the CRC-32 of a part of a file; None if the file is missing or too short."""
    checksum = 0
    try:
        with open(path, "rb") as file:
            file.seek(start)
            while count > 0:
                chunk = file.read(min(count, _CHUNK_BYTES))
                if not chunk:
                    return None
                checksum = zlib.crc32(chunk, checksum)
                count -= len(chunk)
    except FileNotFoundError:
        return None
    return checksum


def _record_of(report: BlockReport) -> dict[str, object]:
    return {
        "worker": report.worker,
        "file": report.file,
        "block": report.block,
        "lines": report.lines,
        "blank_lines": report.blank_lines,
        "dropped": dict(report.dropped),
        "faults": [[fault.line, fault.fault, fault.message] for fault in report.faults],
        "streams": [[*stream, *counts, *report.checksums[stream]] for stream, counts in report.streams.items()],
    }


def _report_of(record: dict[str, Any]) -> BlockReport:
    report = BlockReport(record["worker"], record["file"], record["block"], record["lines"], record["blank_lines"])
    report.dropped = Counter(record["dropped"])
    report.faults = [LineFault(*fault) for fault in record["faults"]]
    for key, part, documents, sequences, tokens, special, *checksums in record["streams"]:
        stream = StreamName(key, part)
        report.streams[stream] = StreamCounts(documents, sequences, tokens, special)
        report.checksums[stream] = (checksums[0], checksums[1], checksums[2])
    return report
