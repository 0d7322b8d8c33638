"""Divides the input into blocks of bytes, and reads the lines that begin in a block."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.data.preparation.compression import CHECKS, DAMAGE, open_plain, open_raw
from megatron.data.preparation.inputs import InputFile

_LARGEST_BLOCK = 16 << 20
_SMALLEST_BLOCK = 4 << 10
_BLOCKS_PER_WORKER = 8
_USUAL_COMPRESSION = 4
_BUFFER = 1 << 20


@dataclass(frozen=True)
class WorkItem:
    """The unit of work of a worker: blocks `first_block`, `first_block` + `step`, ... of a file.

    An item of a plain file is one block, and an item of a file with groups is one group. A compressed file can be read
    only from its beginning. Its items have every `step`-th block, and each worker decompresses the whole file.
    """

    file: InputFile
    first_block: int
    step: int
    blocks: int | None
    """Number of blocks; None: all up to the end of the file."""


@dataclass(frozen=True)
class Plan:
    """All work items, in the order in which workers take them."""

    files: tuple[InputFile, ...]
    work_items: tuple[WorkItem, ...]
    block_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all input files on disk."""
        return sum(file.size for file in self.files)

    def blocks_of(self, file: InputFile) -> int | None:
        """Returns the number of a file's blocks; None for a compressed file, whose length is not known."""
        if file.has_groups:
            return file.row_groups
        return None if file.compressed else -(-file.size // self.block_bytes)


def plan_blocks(files: tuple[InputFile, ...], workers: int, block_bytes: int | None = None) -> Plan:
    """Plans blocks that are small enough to occupy all workers, and large enough to have little overhead.

    `block_bytes` sets the size of blocks: a run that continues the work of a killed run needs that run's size.
    """
    if block_bytes is None:
        inflated = sum(file.size * (_USUAL_COMPRESSION if file.compressed else 1) for file in files)
        block_bytes = min(max(inflated // (workers * _BLOCKS_PER_WORKER), _SMALLEST_BLOCK), _LARGEST_BLOCK)
    plan = Plan(files, (), block_bytes)
    shares = max(1, -(-workers // max(1, sum(file.compressed for file in files))))
    work_items: list[WorkItem] = []
    for file in files:
        blocks = plan.blocks_of(file)
        if blocks is None:
            work_items += [WorkItem(file, share, shares, None) for share in range(shares)]
        else:
            work_items += [WorkItem(file, block, 1, 1) for block in range(blocks)]
    return Plan(files, tuple(work_items), block_bytes)


class LineReader:
    """Reads lines of a file by the position of their first byte in the decompressed file. Reads forward only.

    A context manager. Raises UserError, naming the file, if a compressed file is damaged.
    """

    def __init__(self, file: InputFile, longest: int) -> None:
        self._file = file
        self._longest = longest
        self._raw = open_raw(file.path)
        self._stream = open_plain(self._raw, file.path, file.kind)
        self._position = 0  # always the start of a line after seek_line
        self.ended = False

    def __enter__(self) -> "LineReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    @property
    def position(self) -> int:
        """Position of the next line; at the end, the length of the file."""
        return self._position

    @property
    def bytes_read(self) -> int:
        """Bytes read so far from disk."""
        return self._raw.tell()

    def seek_line(self, offset: int) -> None:
        """Moves to the first line that begins at `offset` or later."""
        if self._position >= offset:
            return
        try:
            if self._file.compressed:
                self._skip(offset - 1 - self._position)
            else:
                self._stream.seek(offset - 1)
                self._position = offset - 1
            self._skip_rest_of_line()
        except DAMAGE as error:
            raise self._damaged(error) from None

    def lines_before(self, end: int) -> Iterator[bytes | None]:
        """Yields the lines that begin before `end`, with their newlines; None for a line that is too long."""
        while self._position < end:
            try:
                line = self._stream.readline(self._longest + 1)
                self._position += len(line)
                if not line:
                    self.ended = True
                    return
                too_long = len(line) > self._longest and not line.endswith(b"\n")
                if too_long:
                    self._skip_rest_of_line()
            except DAMAGE as error:
                raise self._damaged(error) from None
            yield None if too_long else line

    def _skip(self, count: int) -> None:
        while count > 0:
            chunk = self._stream.read(min(count, _BUFFER))
            if not chunk:
                self.ended = True
                return
            count -= len(chunk)
            self._position += len(chunk)

    def _skip_rest_of_line(self) -> None:
        while not self.ended:
            chunk = self._stream.readline(_BUFFER)
            self._position += len(chunk)
            self.ended = not chunk
            if chunk.endswith(b"\n"):
                return

    def _damaged(self, error: Exception) -> UserError:
        path, position = self._file.path, self._position
        return UserError(
            f"{path}: damaged after {position} bytes of text: {error}; {CHECKS[self._file.kind]} says more"
        )
