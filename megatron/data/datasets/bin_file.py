"""Reads a .bin file of tokens, through a memory map or by positioned reads."""

import errno
import mmap
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron.core.exceptions import UserError
from megatron.data.datasets.object_store import RemoteBin, is_url, read_bytes


class MappedBin:
    """Reads a file through a memory map, which is made at the first read."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._bytes: np.ndarray | None = None
        self.size = _size_of(path)

    def read(self, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns `count` tokens from byte `start` on. The file must have them."""
        if self._bytes is None:
            self._bytes = np.frombuffer(_map(self._path), np.uint8) if self.size else np.empty(0, np.uint8)
        return np.frombuffer(self._bytes, dtype, count, start) if count else np.empty(0, dtype)


class ReadBin:
    """Reads a file by positioned reads, which are safe with threads and forked processes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.size = _size_of(path)

    def read(self, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns `count` tokens from byte `start` on. Raises UserError if the file has become shorter."""
        if self._file is None:
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 (lives as long as the dataset)
        data = bytearray()
        while len(data) < count * dtype.itemsize:
            part = os.pread(self._file.fileno(), count * dtype.itemsize - len(data), start + len(data))
            if not part:
                raise UserError(f"{self._path}: was shortened while it was read")
            data += part
        return np.frombuffer(data, dtype)


def open_bin(path: str, mapped: bool) -> MappedBin | ReadBin | RemoteBin:
    """Returns a reader of a token file, which may be an object in a store."""
    if is_url(path):
        return RemoteBin(path)
    return MappedBin(path) if mapped else ReadBin(path)


def _size_of(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; its .idx file needs it") from None


def _map(path: str) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise UserError(f"{path}: too many open files in this process; raise the limit (ulimit -n)") from None
        raise


def map_or_read(path: str, limit: int = 1 << 20) -> mmap.mmap | bytes:
    """Reads a small file and maps a large one. A map needs a file descriptor, and a blend may have thousands of
    files. An object in a store is read."""
    if is_url(path):
        return read_bytes(path)
    return Path(path).read_bytes() if _size_of(path) <= limit else _map(path)
