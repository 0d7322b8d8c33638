"""Reads a .bin file of tokens by positioned reads.

A memory map would save a copy of each sample. But a mapped file that becomes shorter ends the process by a bus error,
without a word, and each map holds a file descriptor. A positioned read costs a microsecond more.
"""

import errno
import functools
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron.core.exceptions import UserError
from megatron.core.utils.files import require_regular
from megatron.data.datasets.object_store import RemoteBin, is_url, read_bytes


class ReadBin:
    """Reads a file by positioned reads, which are safe with threads and forked processes. The file is opened at a read,
    and closed when others were used more recently (`most_open_files`)."""

    def __init__(self, path: str) -> None:
        self._path = path
        found = status_of_file(path)
        self.size = found.st_size
        self._identity = found.st_dev, found.st_ino, found.st_mtime_ns

    def read(self, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns `count` tokens from byte `start` on. Raises UserError if the file has become shorter."""
        size = count * dtype.itemsize
        if not size:
            return np.empty(0, dtype)
        file = _open_files()(self._path, self._identity)
        data = os.pread(file.descriptor, size, start)
        while len(data) < size:  # a large read, or a file that has become shorter
            part = os.pread(file.descriptor, size - len(data), start + len(data))
            if not part:
                raise UserError(
                    f"{self._path}: was shortened while it was read: {start + len(data)} bytes, before {self.size}"
                )
            data += part
        return np.frombuffer(data, dtype)


class _OpenFile:
    """An open file. It closes with its last reference, so that a read that has begun can end."""

    def __init__(self, path: str) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def most_open_files() -> int:
    """Returns how many .bin files a process keeps open: half of the files that the system allows it (ulimit -n)."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if limit == resource.RLIM_INFINITY else max(4, limit // 2)


@functools.cache
def _open_files() -> Callable[[str, tuple[int, ...]], _OpenFile]:
    """Returns a function that opens a file, or returns it if it is open. A file that has replaced another one at the
    same path has another identity."""

    def open_file(path: str, identity: tuple[int, ...]) -> _OpenFile:
        try:
            return _OpenFile(path)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise UserError(f"{path}: {error.strerror}") from None
        recent.cache_clear()  # something else has taken the descriptors
        try:
            return _OpenFile(path)
        except OSError as error:
            raise _cannot_open(path, error) from None

    recent = functools.lru_cache(maxsize=most_open_files())(open_file)
    return recent


def _cannot_open(path: str, error: OSError) -> UserError:
    if error.errno != errno.EMFILE:
        return UserError(f"{path}: {error.strerror}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UserError(
        f"{path}: too many open files in this process: {soft} are allowed (ulimit -n), up to {hard} without the "
        "administrator; raise the limit, or merge data sets (tools/merge_datasets.py)"
    )


def open_bin(path: str) -> ReadBin | RemoteBin:
    """Returns a reader of a token file, which may be an object in a store."""
    return RemoteBin(path) if is_url(path) else ReadBin(path)


def status_of_file(path: str) -> os.stat_result:
    """Returns the size of a data file, and what else the system knows. Raises UserError if it does not exist, and for a
    pipe or device, whose reader would wait forever."""
    try:
        found = Path(path).stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; its .idx file needs it") from None
    try:
        require_regular(path, found.st_mode)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; copy the data into a file") from None
    return found


def _map(path: str) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _cannot_open(path, error) from None


def map_or_read(path: str, limit: int = 1 << 20) -> mmap.mmap | bytes:
    """Reads a small file and maps a large one. A map needs a file descriptor, and a blend may have thousands of
    files. An object in a store is read."""
    if is_url(path):
        return read_bytes(path)
    return Path(path).read_bytes() if status_of_file(path).st_size <= limit else _map(path)
