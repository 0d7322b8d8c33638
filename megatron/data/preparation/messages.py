"""Messages between the parent process and the workers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from numpy.typing import DTypeLike

from megatron.data.preparation.blocks import Plan
from megatron.data.preparation.json_lines import Fault
from megatron.data.preparation.sentences import SentenceSplitter
from megatron.data.preparation.shards import Checksums, StreamCounts, StreamName
from megatron.data.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class Job:
    """The settings of all workers."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    partitions: int
    eod: int | None
    on_error: Literal["stop", "skip"]
    longest_line: int
    dtype: DTypeLike
    folder: Path
    plan: Plan
    splitter: SentenceSplitter | None = None
    """Divides texts into sentences; None: a text is one sequence."""
    separator: str | None = None
    """Divides text files into documents; None: a file is a document."""
    first_worker: int = 0
    """Number of this run's first worker in the names of shards. Workers of earlier runs have smaller numbers."""
    done: frozenset[tuple[int, int]] = frozenset()
    """Blocks (file, block) that an earlier run has finished."""
    ends: Mapping[int, int] = field(default_factory=dict)
    """Number of blocks of each compressed file whose end an earlier run has found."""

    @property
    def streams(self) -> list[StreamName]:
        """The streams that each worker writes: one per key and part."""
        return [StreamName(key, part) for key in range(len(self.keys)) for part in range(self.partitions)]


@dataclass(frozen=True)
class LineFault:
    """A bad line: its number within its block (from 0), the kind of fault and a description."""

    line: int
    fault: Fault
    message: str


@dataclass
class BlockReport:
    """The result of one block."""

    worker: int
    file: int
    block: int
    lines: int = 0
    blank_lines: int = 0
    dropped: Counter[Fault] = field(default_factory=Counter)
    faults: list[LineFault] = field(default_factory=list)
    """The first dropped lines, or the line at which the worker stopped."""
    stopped: bool = False
    streams: dict[StreamName, StreamCounts] = field(default_factory=dict)
    checksums: dict[StreamName, Checksums] = field(default_factory=dict)
    """CRC-32 of the bytes in the files of each stream."""


@dataclass(frozen=True)
class FileEnd:
    """The number of blocks of a compressed file. It is known only at the end of the file."""

    file: int
    blocks: int


@dataclass(frozen=True)
class Failure:
    """An error that ends a worker and is not the fault of a line."""

    message: str
    expected: bool
    """Whether the user can correct it. If not, `message` is a traceback."""
    resumable: bool = False
    """Whether the next run can use the finished blocks: the input is not the cause."""


Message = BlockReport | FileEnd | Failure


@dataclass(frozen=True)
class Shared:
    """Numbers that all processes share."""

    next_work_item: Any
    """Synchronized int: index of the next work item."""
    stop_from: Any
    """Int: blocks from this number on (`block_number`) are no longer needed."""
    progress: Any
    """Ints: bytes read, documents and tokens of each worker."""


def block_number(file: int, block: int) -> int:
    """Returns a number that orders the blocks of all files as in the input."""
    return file << 40 | block
