"""Reads Parquet files row group by row group. Each row becomes a line of JSON, as .jsonl files have them.

Needs the optional package pyarrow.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.exceptions import UserError
from megatron.data.datasets.object_store import is_url, open_object

_ROWS_AT_ONCE = 256


def count_row_groups(path: str) -> int:
    """Returns the number of a file's row groups. Raises UserError if it is damaged or pyarrow is missing."""
    with _open(path) as file:
        return file.metadata.num_row_groups


class ParquetReader:
    """Reads the rows of row groups as lines of JSON, with the columns `keys`, or all. A context manager.

    Raises UserError, naming the file, if a column is missing or contains no text, or if the file is damaged.
    """

    def __init__(self, path: str, keys: Sequence[str], longest: int, all_columns: bool = False) -> None:
        self._path = path
        self._longest = longest
        self._file = _open(path)
        chosen = list(dict.fromkeys(keys))
        check_columns(path, self._file.schema_arrow, chosen)
        self._columns = None if all_columns else chosen
        self.bytes_read = 0
        """Compressed bytes of the rows that were read so far."""

    def __enter__(self) -> "ParquetReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def lines_of_group(self, group: int) -> Iterator[bytes | None]:
        """Yields the rows of a row group; None for a row that is longer than `longest` bytes."""
        import pyarrow

        metadata = self._file.metadata.row_group(group)
        size = sum(metadata.column(index).total_compressed_size for index in range(metadata.num_columns))
        before, rows = self.bytes_read, 0
        try:
            for batch in self._file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=self._columns):
                rows += batch.num_rows
                self.bytes_read = before + size * rows // max(metadata.num_rows, 1)
                for row in batch.to_pylist():
                    line = json.dumps(row, ensure_ascii=False, default=str).encode()
                    yield line if len(line) <= self._longest else None
        except (pyarrow.ArrowException, OSError) as error:
            raise _damaged(self._path, error) from None


def read_parquet_schema(path: str) -> Any:
    """Returns the schema of a Parquet file, as Arrow has it."""
    with _open(path) as file:
        return file.schema_arrow


def _open(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"--input {path}: a Parquet file, which needs a package: pip install pyarrow") from None
    try:
        return pyarrow.parquet.ParquetFile(open_object(path) if is_url(path) else path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


def _damaged(path: str, error: Exception) -> UserError:
    return UserError(f"{path}: damaged, or no Parquet file: {' '.join(str(error).split())}")


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
