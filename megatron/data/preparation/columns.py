"""Reads Parquet files row group by row group, and the Arrow files that `Dataset.save_to_disk` of Hugging Face writes
batch by batch. Each row becomes a line of JSON, as .jsonl files have them. Needs the optional package pyarrow."""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.exceptions import UserError
from megatron.data.datasets.object_store import is_url, open_object

ARROW_ENDING = ".arrow"
ARROW_METADATA = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files beside Arrow's data that are no data."""
_ROWS_AT_ONCE = 256


def count_row_groups(path: str) -> int:
    """Returns the number of a Parquet file's row groups. Raises UserError if it is damaged or pyarrow is missing."""
    with _open_parquet(path) as file:
        return file.metadata.num_row_groups


def count_batches(path: str) -> int:
    """Returns the number of an Arrow file's record batches. Raises UserError if it is damaged or pyarrow is missing."""
    return sum(1 for _ in _batches(path))


def read_schema(path: str, kind: str) -> Any:
    """Returns the schema of a file of this kind, parquet or arrow, as Arrow has it."""
    if kind == "arrow":
        return _open_arrow(path).schema
    with _open_parquet(path) as file:
        return file.schema_arrow


class ColumnReader(ABC):
    """Reads the rows of groups as lines of JSON, with the columns `keys`, or all. A context manager.

    Raises UserError, naming the file, if a column is missing or contains no text, or if the file is damaged.
    """

    _file: Any = None
    """The open file, if it is to be closed."""

    def __init__(self, path: str, keys: Sequence[str], longest: int, all_columns: bool = False) -> None:
        self._path, self._longest = path, longest
        chosen = list(dict.fromkeys(keys))
        check_columns(path, self._open(), chosen)
        self._columns = None if all_columns else chosen
        self.bytes_read = 0
        """Bytes of the rows that were read so far, compressed in a Parquet file."""

    def __enter__(self) -> "ColumnReader":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @abstractmethod
    def _open(self) -> object:
        """Opens the file and returns its schema."""

    @abstractmethod
    def _rows(self, group: int) -> Iterator[dict[str, object]]:
        """Yields the rows of a group, and adds their bytes to `bytes_read`."""

    def lines_of_group(self, group: int) -> Iterator[bytes | None]:
        """Yields the rows of a group; None for a row that is longer than `longest` bytes."""
        for row in self._rows(group):
            line = json.dumps(row, ensure_ascii=False, default=str).encode()
            yield line if len(line) <= self._longest else None


class ArrowReader(ColumnReader):
    """Reads the record batches of an Arrow file."""

    def _open(self) -> object:
        return _open_arrow(self._path).schema

    def _rows(self, group: int) -> Iterator[dict[str, object]]:
        batch = next(batch for number, batch in enumerate(_batches(self._path)) if number == group)
        self.bytes_read += batch.nbytes
        yield from (batch if self._columns is None else batch.select(self._columns)).to_pylist()


class ParquetReader(ColumnReader):
    """Reads the row groups of a Parquet file."""

    def _open(self) -> object:
        self._file = _open_parquet(self._path)
        return self._file.schema_arrow

    def _rows(self, group: int) -> Iterator[dict[str, object]]:
        metadata = self._file.metadata.row_group(group)
        size = sum(metadata.column(index).total_compressed_size for index in range(metadata.num_columns))
        before, rows = self.bytes_read, 0
        with _naming_damage(self._path, "Parquet"):
            for batch in self._file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=self._columns):
                rows += batch.num_rows
                self.bytes_read = before + size * rows // max(metadata.num_rows, 1)
                yield from batch.to_pylist()


def _load_pyarrow(path: str, kind: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"--input {path}: {kind} file, which needs a package: pip install pyarrow") from None
    return pyarrow


@contextlib.contextmanager
def _naming_damage(path: str, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged, or no {kind} file: {' '.join(str(error).split())}") from None


def _open_parquet(path: str) -> Any:
    pyarrow = _load_pyarrow(path, "a Parquet")
    with _naming_damage(path, "Parquet"):
        return pyarrow.parquet.ParquetFile(open_object(path) if is_url(path) else path)


def _open_arrow(path: str) -> Any:
    pyarrow = _load_pyarrow(path, "an Arrow")
    with _naming_damage(path, "Arrow"):
        file = pyarrow.PythonFile(open_object(path)) if is_url(path) else pyarrow.memory_map(path)
        try:
            return pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            file.seek(0)
            return pyarrow.ipc.open_file(file)


def _batches(path: str) -> Iterator[Any]:
    reader = _open_arrow(path)
    with _naming_damage(path, "Arrow"):
        if hasattr(reader, "get_batch"):  # Arrow's random access format
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from reader


def check_columns(path: str, schema: Any, keys: Sequence[str]) -> None:
    """Raises UserError if a column is missing from an Arrow schema, or contains neither texts nor lists of texts."""
    import pyarrow.types as types

    for key in keys:
        if key not in schema.names:
            raise UserError(f"{path}: no column {key!r}; columns present: {', '.join(map(repr, schema.names))}")
        found = schema.field(key).type
        inner = found.value_type if types.is_list(found) or types.is_large_list(found) else found
        inner = inner.value_type if types.is_dictionary(inner) else inner
        if not (types.is_string(inner) or types.is_large_string(inner) or types.is_null(inner)):
            raise UserError(f"{path}: column {key!r} contains {found}, not texts or lists of texts")
