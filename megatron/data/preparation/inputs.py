"""Finds the input files: named files, patterns, and all text files of folders."""

import glob
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.data.preparation import arrow, text_files
from megatron.data.preparation.compression import Kind, kind_of
from megatron.data.preparation.parquet import count_row_groups

_LINES = (".jsonl", ".json", ".ndjson")
ENDINGS = (
    *_LINES,
    *(f"{name}{packed}" for packed in (".gz", ".xz", ".zst") for name in _LINES),
    ".parquet",
    arrow.ENDING,
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
    """Time of the last change, in nanoseconds."""

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
        real = os.path.realpath(path)
        if real in seen:
            warn(f"--input: {path} is read more than once")
        seen.add(real)
    return tuple(_look_at(index, path, warn) for index, path in enumerate(paths))


def _expanded(pattern: str, warn: Callable[[str], None]) -> list[str]:
    found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise UserError(f"--input {pattern}: no such file")
    return [file for path in found for file in (_files_in(path, warn) if os.path.isdir(path) else [path])]


def _files_in(folder: str, warn: Callable[[str], None]) -> list[str]:
    """Returns the files of a folder and of its subfolders, except hidden ones, in the order of their paths."""
    paths = []
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        metadata = arrow.METADATA if any(map(_is_arrow, names)) or arrow.METADATA[-1] in names else ()
        data = [name for name in names if name not in metadata and not name.startswith(".")]
        paths += [os.path.join(parent, name) for name in data]
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


def _is_arrow(name: str) -> bool:
    return name.lower().endswith(arrow.ENDING)


def _refuse(error: OSError) -> None:
    raise UserError(f"--input {error.filename}: {error.strerror}")


def _look_at(index: int, path: str, warn: Callable[[str], None]) -> InputFile:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"--input {path}: not a file that can be read in parts; name a file or a folder of files")
        with open(path, "rb") as file:
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
        kind, groups = "arrow", arrow.count_batches(path)
    elif kind == "parquet":
        groups = count_row_groups(path)
    return InputFile(index, path, status.st_size, kind, groups, status.st_mtime_ns)
