"""The reader of each kind of input file, and which column is read if the user names none."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from megatron.data.preparation.blocks import LineReader
from megatron.data.preparation.columns import ArrowReader, ParquetReader, read_schema
from megatron.data.preparation.inputs import InputFile
from megatron.data.preparation.text_files import TextReader


class GroupReader(AbstractContextManager["GroupReader"], Protocol):
    """Reads a file whose documents are not lines, in groups of documents."""

    bytes_read: int

    def lines_of_group(self, group: int) -> Iterator[bytes | None]:
        """Yields the documents of a group as lines of JSON; None for one that is too long."""
        ...


def string_columns(file: InputFile) -> tuple[list[str], list[str]]:
    """Returns the columns of a Parquet or Arrow file, and those of them that contain texts."""
    schema = read_schema(file.path, file.kind)
    return list(schema.names), [field.name for field in schema if str(field.type) in ("string", "large_string")]


def open_groups(
    file: InputFile, keys: Sequence[str], longest: int, separator: str | None = None, all_columns: bool = False
) -> GroupReader:
    """Opens a file that has groups (`InputFile.has_groups`). `separator` divides text files into documents."""
    if file.kind == "text":
        return TextReader(file.path, keys, longest, separator)
    return (ArrowReader if file.kind == "arrow" else ParquetReader)(file.path, keys, longest, all_columns)


_DEFAULT, _OTHER = "text", "content"
_LONGEST = 256 << 20


def resolve_keys(keys: Sequence[str], files: Sequence[InputFile], warn: Callable[[str], None]) -> list[str]:
    """Returns the keys to read. Looks at the first row of the first file if `keys` is the default. `warn` gets a line
    if another column is taken."""
    if list(keys) != [_DEFAULT] or not files or files[0].kind == "text":
        return list(keys)
    names, texts = string_columns(files[0]) if files[0].has_groups else _columns_of_lines(files[0])
    if _DEFAULT in names or texts != [_OTHER]:
        return list(keys)
    warn(f"--json-keys: {files[0].path} has no key {_DEFAULT!r}; {_OTHER!r}, its only one with texts, is read")
    return [_OTHER]


def _columns_of_lines(file: InputFile) -> tuple[list[str], list[str]]:
    with LineReader(file, _LONGEST) as lines:
        first = next((line for line in lines.lines_before(file.size + _LONGEST) if line is None or line.strip()), None)
    try:
        record = json.loads(first or b"null")
    except (ValueError, RecursionError):
        return [], []
    if not isinstance(record, dict):
        return [], []
    return list(record), [name for name, value in record.items() if isinstance(value, str)]
