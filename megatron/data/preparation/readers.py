"""The reader of each kind of input file."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from megatron.data.preparation.arrow import ArrowReader, read_arrow_schema
from megatron.data.preparation.inputs import InputFile
from megatron.data.preparation.parquet import ParquetReader, read_parquet_schema
from megatron.data.preparation.text_files import TextReader


class GroupReader(AbstractContextManager["GroupReader"], Protocol):
    """Reads a file whose documents are not lines, in groups of documents."""

    bytes_read: int

    def lines_of_group(self, group: int) -> Iterator[bytes | None]:
        """Yields the documents of a group as lines of JSON; None for one that is too long."""
        ...


def string_columns(file: InputFile) -> tuple[list[str], list[str]]:
    """Returns the columns of a Parquet or Arrow file, and those of them that contain texts."""
    schema = (read_arrow_schema if file.kind == "arrow" else read_parquet_schema)(file.path)
    return list(schema.names), [field.name for field in schema if str(field.type) in ("string", "large_string")]


def open_groups(
    file: InputFile, keys: Sequence[str], longest: int, separator: str | None = None, all_columns: bool = False
) -> GroupReader:
    """Opens a file that has groups (`InputFile.has_groups`). `separator` divides text files into documents."""
    if file.kind == "text":
        return TextReader(file.path, keys, longest, separator)
    return (ArrowReader if file.kind == "arrow" else ParquetReader)(file.path, keys, longest, all_columns)
