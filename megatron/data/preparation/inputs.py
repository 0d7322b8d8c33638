"""Finds the input files: named files, patterns, and all text files of folders, here or in an object store."""

import glob
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.data.datasets.object_store import is_url, objects_like, objects_under, size_of, version_of
from megatron.data.preparation import text_files
from megatron.data.preparation.columns import ARROW_ENDING, ARROW_METADATA, count_batches, count_row_groups
from megatron.data.preparation.compression import Kind, kind_of, open_raw
from megatron.data.preparation.manifest import CLEANING_REPORT

_LINES = (".jsonl", ".json", ".ndjson")
ENDINGS = (
    *_LINES,
    *(f"{name}{packed}" for packed in (".gz", ".xz", ".zst") for name in _LINES),
    ".parquet",
    ARROW_ENDING,
)
"""Endings of the files that are taken from a folder."""


@dataclass(frozen=True)
class InputFile:
    """An input file, and its index in the order of files."""

    index: int
    path: str
    size: int
    kind: Kind = "plain"
    row_groups: int = 0
    """Row groups of a Parquet file, record batches of an Arrow file; 1 for a text file."""
    modified_ns: int = 0
    """Time of the last change, in nanoseconds; of an object in a store, a number that changes with it."""

    @property
    def compressed(self) -> bool:
        """Whether the file can be read only from its beginning."""
        return self.kind in ("gzip", "xz", "zstd")

    @property
    def has_groups(self) -> bool:
        """Whether the file is read in groups of documents, not in blocks of lines."""
        return self.kind in ("parquet", "arrow", "text")


def find_inputs(patterns: Sequence[str], warn: Callable[[str], None] = lambda _: None) -> tuple[InputFile, ...]:
    """Returns the files of --input, with patterns and folders expanded, each in the order of their names.

    `warn` gets a line for each file that is read twice, and one for the files of a folder that are not read. Raises
    UserError if a file cannot be read.
    """
    paths = [path for pattern in patterns for path in _expanded(pattern, warn)]
    seen: set[str] = set()
    for path in paths:
        real = path if is_url(path) else os.path.realpath(path)
        if real in seen:
            warn(f"--input: {path} is read more than once")
        seen.add(real)
    return tuple(_look_at(index, path, warn) for index, path in enumerate(paths))


def _expanded(pattern: str, warn: Callable[[str], None]) -> list[str]:
    if is_url(pattern):
        found = objects_like(pattern)
    else:
        names = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = {name: os.path.isdir(name) for name in names}
    if not found:
        raise UserError(f"--input {pattern}: no such file")
    paths: list[str] = []
    for path, is_folder in found.items():
        files = objects_under(path) if is_url(path) and is_folder else _files_in(path)
        paths += _data_files(path, files, warn) if is_folder else [path]
    return paths


def _files_in(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(parent, name) for name in names)


def _data_files(folder: str, files: Iterable[str], warn: Callable[[str], None]) -> list[str]:
    """Returns those of a folder's files that are data, in the order of their paths. Hidden ones are none."""
    names: dict[str, set[str]] = {}
    for path in files:
        parent, _, name = path.rpartition("/")
        names.setdefault(parent, set()).add(name)
    paths = []
    for parent, there in names.items():
        if any(part.startswith(".") for part in parent.removeprefix(folder.rstrip("/")).split("/")):
            continue
        metadata = set(ARROW_METADATA) if any(map(_is_arrow, there)) or ARROW_METADATA[-1] in there else set()
        if any(map(_KEPT_ROWS.fullmatch, there)):
            metadata.add(CLEANING_REPORT)
        paths += [f"{parent}/{name}" for name in there if name not in metadata and not name.startswith(".")]
    taken = sorted(path for path in paths if path.lower().endswith(ENDINGS))
    # Beside files of records, text files describe them, such as README.md.
    taken = taken or sorted(path for path in paths if path.lower().endswith(text_files.ENDINGS))
    others = sorted(set(paths) - set(taken))
    if not taken:
        known = ", ".join((*ENDINGS, *text_files.ENDINGS))
        raise UserError(f"--input {folder}: a folder without input files, whose names end in {known}")
    if others:
        warn(f"--input {folder}: {len(others)} files with other endings are not read, such as {others[0]}")
    return taken


_KEPT_ROWS = re.compile(r"\d{5}-.*\.jsonl")
"""Names of the files that tools/dedup.py and tools/filter_data.py write."""


def _is_arrow(name: str) -> bool:
    return name.lower().endswith(ARROW_ENDING)


def _refuse(error: OSError) -> None:
    raise UserError(f"--input {error.filename}: {error.strerror}")


def _look_at(index: int, path: str, warn: Callable[[str], None]) -> InputFile:
    size, modified = _size_and_version(path)
    try:
        with open_raw(path) as file:
            start = file.read(8)
    except OSError as error:
        raise UserError(f"--input {path}: {error.strerror}") from None
    kind = kind_of(path, start)
    groups = 0
    if kind == "plain" and path.lower().endswith(text_files.ENDINGS):
        kind, groups = "text", 1
        if start.lstrip().startswith(b'{"'):
            warn(f"--input {path}: read as text, by its name; if it contains JSON lines, rename it to .jsonl")
    elif kind == "arrow" or (kind == "plain" and _is_arrow(path)):
        kind, groups = "arrow", count_batches(path)
    elif kind == "parquet":
        groups = count_row_groups(path)
    return InputFile(index, path, size, kind, groups, modified)


def _size_and_version(path: str) -> tuple[int, int]:
    if is_url(path):
        return size_of(path), int(hashlib.sha256(str(version_of(path)).encode()).hexdigest()[:12], 16)
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"--input {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"--input {path}: not a file that can be read in parts; name a file or a folder of files")
    return status.st_size, status.st_mtime_ns
