"""What the parent tells workers, and what they tell it."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from numpy.typing import DTypeLike

from megatron.training.data_preparation.blocks import Plan
from megatron.training.data_preparation.records import Fault
from megatron.training.data_preparation.shards import StreamCounts, StreamName
from megatron.training.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class Job:
    """What all workers are told."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    partitions: int
    eod: int | None
    on_error: Literal["stop", "skip"]
    longest_line: int
    dtype: DTypeLike
    folder: Path
    plan: Plan

    @property
    def streams(self) -> list[StreamName]:
        return [StreamName(key, part) for key in range(len(self.keys)) for part in range(self.partitions)]


@dataclass(frozen=True)
class LineFault:
    """A bad line: its place among the lines of its block, from 0."""

    line: int
    fault: Fault
    message: str


@dataclass
class BlockReport:
    """What became of one block."""

    worker: int
    file: int
    block: int
    lines: int = 0
    blank_lines: int = 0
    dropped: Counter[Fault] = field(default_factory=Counter)
    faults: list[LineFault] = field(default_factory=list)
    """The first of the dropped lines; or the line at which the worker stopped."""
    stopped: bool = False
    streams: dict[StreamName, StreamCounts] = field(default_factory=dict)


@dataclass(frozen=True)
class FileEnd:
    """A compressed file has this many blocks."""

    file: int
    blocks: int


@dataclass(frozen=True)
class Failure:
    """The worker cannot go on, whatever the line."""

    message: str
    expected: bool
    """It is the user's to mend."""


Message = BlockReport | FileEnd | Failure


@dataclass(frozen=True)
class Shared:
    """Numbers that processes share."""

    next_unit: Any
    """Synchronized int: index of the unit that is handed out next."""
    stop_from: Any
    """Plain int: blocks from this place on (`place_of_block`) are no longer wanted."""
    progress: Any
    """Plain ints: bytes read, documents, tokens of each worker."""


def place_of_block(file: int, block: int) -> int:
    """Blocks in the order of the input."""
    return file << 40 | block
