"""Rows of any input file as plain lines of JSON, in blocks that workers scan, and read again by their offset."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.core.utils.files import open_atomically
from megatron.data.datasets.object_store import is_url
from megatron.data.preparation.blocks import LineReader
from megatron.data.preparation.inputs import InputFile
from megatron.data.preparation.json_lines import BadLine, texts_of_line
from megatron.data.preparation.readers import open_groups

LONGEST_LINE = 256 << 20
"""Bytes of the longest line that is accepted."""

_BLOCK_BYTES = 8 << 20
"""Size of a block. It does not depend on the number of workers, so that a run can continue with another number."""


@dataclass(frozen=True)
class Source:
    """An input file as plain lines of JSON: the file itself, or a copy that is not compressed."""

    file: InputFile
    path: str
    """File of the plain lines."""

    @property
    def output_name(self) -> str:
        """Name of the file of kept rows."""
        return f"{self.file.index:05d}-{Path(self.file.path).name.split('.')[0]}.jsonl"


@dataclass(frozen=True)
class Block:
    """The lines of a source whose first byte is in [start, end)."""

    number: int
    """Index among the blocks of all sources."""
    source: Source
    start: int
    end: int


@dataclass(frozen=True)
class Row:
    """A line that is not blank."""

    offset: int
    """Position of its first byte in the plain file."""
    line_number: int
    """Number of the line within its block, from 0."""
    line: bytes
    text: str
    """The text of the key; texts of a list are joined by newlines."""
    fault: BadLine | None = None
    """What is wrong with the line, which then has no text."""


def source_of(file: InputFile, folder: Path) -> Source:
    """Returns the source of a file. The plain lines of a compressed, Parquet, Arrow or text file, or of an object in a
    store, go to `folder`."""
    plain = (
        file.path if file.kind == "plain" and not is_url(file.path) else str(folder / f"plain-{file.index:05d}.jsonl")
    )
    return Source(file, plain)


def write_plain_lines(source: Source, key: str) -> None:
    """Writes the plain lines of a file that is not plain, unless they exist. Rows of Parquet and Arrow keep all
    columns."""
    file = source.file
    if source.path == file.path or Path(source.path).exists():
        return
    with open_atomically(source.path) as plain:
        for number, line in enumerate(_lines_of(file, key), 1):
            if line is None:
                raise UserError(f"{file.path}:{number}: longer than {LONGEST_LINE} bytes")
            plain.write(line if line.endswith(b"\n") else line + b"\n")


def _lines_of(file: InputFile, key: str) -> Iterator[bytes | None]:
    if file.has_groups:
        with open_groups(file, [key], LONGEST_LINE, all_columns=True) as rows:
            for group in range(file.row_groups):
                yield from rows.lines_of_group(group)
        return
    with LineReader(file, LONGEST_LINE) as lines:
        yield from lines.lines_before(sys.maxsize)


def divide(sources: Sequence[Source], block_bytes: int = _BLOCK_BYTES) -> list[Block]:
    """Returns the blocks of all sources, in the order of the input."""
    blocks: list[Block] = []
    for source in sources:
        size = Path(source.path).stat().st_size
        blocks += [
            Block(len(blocks) + index, source, start, min(start + block_bytes, size))
            for index, start in enumerate(range(0, size, block_bytes))
        ]
    return blocks


def read_rows(block: Block, key: str, skip_bad: bool) -> Iterator[Row]:
    """Yields the rows of a block. With `skip_bad`, a bad line is a row with a fault; otherwise UserError names it."""
    plain = InputFile(0, block.source.path, block.end)
    with LineReader(plain, LONGEST_LINE) as reader:
        reader.seek_line(block.start)
        offset = reader.position
        for number, line in enumerate(reader.lines_before(block.end)):
            fault, text = None, ""
            if line is None or line.strip():
                try:
                    if line is None:
                        raise BadLine("too long", f"longer than {LONGEST_LINE} bytes")
                    text = text_of(line, key)
                except BadLine as error:
                    if not skip_bad:
                        place = _line_number(block.source.path, offset)
                        raise UserError(
                            f"{block.source.file.path}:{place}: {error.message} "
                            "(--on-error skip leaves such lines out and counts them)"
                        ) from None
                    fault = error
                yield Row(offset, number, line or b"", text, fault)
            offset = reader.position


def text_of(line: bytes, key: str) -> str:
    """Returns the text of a line of JSON. Raises BadLine."""
    return "\n".join(texts_of_line(line, [key])[0])


def count_lines(block: Block) -> int:
    """Returns the number of lines that begin in a block."""
    with LineReader(InputFile(0, block.source.path, block.end), LONGEST_LINE) as reader:
        reader.seek_line(block.start)
        return sum(1 for _ in reader.lines_before(block.end))


def _line_number(path: str, offset: int) -> int:
    lines = 1
    with open(path, "rb") as file:
        while offset > 0:
            chunk = file.read(min(offset, 1 << 20))
            lines += chunk.count(b"\n")
            offset -= len(chunk)
    return lines
