"""Atomic file writes (a file is written under a temporary name, synced to disk and then renamed), digests, and JSON."""

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from megatron.core.utils.store_path import StorePath


@contextlib.contextmanager
def open_atomically(path: str | os.PathLike[str], sync: bool = True) -> Iterator[BinaryIO]:
    """Opens a temporary file next to `path` for writing. At the end it replaces `path` in one step.

    On an exception the temporary file is removed and `path` is unchanged. Several writers do not disturb each other:
    each has its own temporary name, and the last rename wins.

    With `sync` False the file is not synced to disk: after a power failure it may be empty or contain zeros. Use this
    only for derived data that is checked when it is read.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with open(aside, "xb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def write_atomically(path: str | os.PathLike[str], content: bytes | str, sync: bool = True) -> None:
    """Replaces the file at `path` by `content` (text as UTF-8) in one step; `sync` as in `open_atomically`."""
    with open_atomically(path, sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Syncs a directory, so that renames in it survive a power failure. Does nothing on file systems that cannot."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular_file(path: str | os.PathLike[str]) -> io.RawIOBase:
    """Opens a file for reading, unbuffered. Raises OSError for anything that is no regular file, such as a folder, a
    FIFO, a socket or a device, which could block or never end; its `strerror` says what it is. A StorePath
    opens an object of a store."""
    if isinstance(path, StorePath):
        return path.open_object()
    require_regular(path, os.stat(path).st_mode)  # before it is opened, which has effects on some devices
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_regular(path, os.fstat(descriptor).st_mode)
        return io.FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def require_regular(path: str | os.PathLike[str], mode: int) -> None:
    """Raises OSError if this is the mode (`st_mode`) of anything else than a regular file."""
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a regular file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular_file(path: str | os.PathLike[str], most: int = -1) -> bytes:
    """Returns the content of a file, or its first `most` bytes. Raises OSError as `open_regular_file` does."""
    with open_regular_file(path) as file:
        return (file.readall() if most < 0 else file.read(most)) or b""


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 hex digest of a file, without reading it into memory as a whole."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: str | bytes, with_nan: bool = False) -> Any:
    """Returns the value of a JSON text.

    Raises ValueError for text that is not JSON, for text that Python's parser cannot read (thousands of nested values)
    and, unless `with_nan` is set, for NaN and Infinity, which Python's parser accepts beyond JSON.
    """
    try:
        return json.loads(text, parse_constant=None if with_nan else _refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
