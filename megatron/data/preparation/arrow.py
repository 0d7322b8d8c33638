"""Reads the Arrow files that `Dataset.save_to_disk` of Hugging Face writes, batch by batch. Each row becomes a line of
JSON. Needs the optional package pyarrow."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.exceptions import UserError
from megatron.data.datasets.object_store import is_url, open_object
from megatron.data.preparation.parquet import check_columns

ENDING = ".arrow"
METADATA = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files beside the data that are no data."""


def count_batches(path: str) -> int:
    """Returns the number of a file's record batches. Raises UserError if it is damaged or pyarrow is missing."""
    return sum(1 for _ in _batches(path))


class ArrowReader:
    """Reads the rows of record batches as lines of JSON, with the columns `keys`, or all. A context manager.

    Raises UserError, naming the file, if a column is missing or contains no text, or if the file is damaged.
    """

    def __init__(self, path: str, keys: Sequence[str], longest: int, all_columns: bool = False) -> None:
        self._path, self._longest = path, longest
        chosen = list(dict.fromkeys(keys))
        check_columns(path, _open(path).schema, chosen)
        self._columns = None if all_columns else chosen
        self.bytes_read = 0
        """Bytes of the batches that were read so far."""

    def __enter__(self) -> "ArrowReader":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def lines_of_group(self, group: int) -> Iterator[bytes | None]:
        """Yields the rows of a batch; None for a row that is longer than `longest` bytes."""
        batch = next(batch for number, batch in enumerate(_batches(self._path)) if number == group)
        self.bytes_read += batch.nbytes
        for row in (batch if self._columns is None else batch.select(self._columns)).to_pylist():
            line = json.dumps(row, ensure_ascii=False, default=str).encode()
            yield line if len(line) <= self._longest else None


def read_arrow_schema(path: str) -> Any:
    """Returns the schema of an Arrow file."""
    return _open(path).schema


def _open(path: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"--input {path}: an Arrow file, which needs a package: pip install pyarrow") from None
    try:
        file = pyarrow.PythonFile(open_object(path)) if is_url(path) else pyarrow.memory_map(path)
        try:
            return pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            file.seek(0)
            return _FileFormat(pyarrow.ipc.open_file(file))
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


class _FileFormat:
    """A file in Arrow's random access format, read like a stream."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.schema = reader.schema

    def __iter__(self) -> Iterator[Any]:
        return (self._reader.get_batch(number) for number in range(self._reader.num_record_batches))


def _batches(path: str) -> Iterator[Any]:
    reader = _open(path)
    import pyarrow

    try:
        yield from reader
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


def _damaged(path: str, error: Exception) -> UserError:
    return UserError(f"{path}: damaged, or no Arrow file: {' '.join(str(error).split())}")
