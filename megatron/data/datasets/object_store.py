"""Objects in stores, such as s3://bucket/corpus, read through the package fsspec: datasets, and the input of tools.

An index (.idx) is read as a whole, or copied once into a local folder (`local_copy`) and mapped from there. Tokens
(.bin) are read sample by sample, in the processes that read ahead. Every process opens its own connection.
"""

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.exceptions import UserError
from megatron.core.utils.files import open_atomically
from megatron.core.utils.stores import StoreError as StoreError
from megatron.core.utils.stores import file_system as file_system
from megatron.core.utils.stores import is_url as is_url
from megatron.core.utils.warn import warn_on_first_rank


def exists(url: str) -> bool:
    """Whether the object exists. Raises StoreError if the store does not answer."""
    return bool(_ask(url, "exists"))


def size_of(url: str) -> int:
    """Returns the size of an object in bytes. Raises UserError if it does not exist, StoreError if the store does not
    answer."""
    return int(_ask(url, "size"))


def read_bytes(url: str, start: int | None = None, stop: int | None = None) -> bytes:
    """Returns an object's bytes [start, stop). Raises UserError if there is no such object, StoreError if the store
    does not answer."""
    return bytes(_ask(url, "cat_file", start=start, end=stop))


def objects_like(url: str) -> dict[str, bool]:
    """Returns the URLs that a URL or a pattern names, in order, and whether each is a folder. A pattern does not name
    hidden objects. Raises UserError if the store cannot be read."""
    store = file_system(url)
    found = {url: _ask(url, "info")} if exists(url) else _ask(url, "glob", detail=True)
    hidden = url.rsplit("/", 1)[-1].startswith(".")
    return {
        url if path == url else store.unstrip_protocol(path): info.get("type") == "directory"
        for path, info in sorted(found.items())
        if hidden or not path.rstrip("/").rsplit("/", 1)[-1].startswith(".")
    }


def objects_under(url: str) -> list[str]:
    """Returns the URLs of all objects in a folder and its folders. Raises UserError if the store cannot be read."""
    return [file_system(url).unstrip_protocol(path) for path in _ask(url, "find")]


def open_object(url: str) -> io.RawIOBase:
    """Opens an object for reading at any place. Its errors are UserError."""
    return _ObjectFile(url)


class _ObjectFile(io.RawIOBase):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._size, self._at = url, size_of(url), 0
        self._block, self._block_start = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        start = self._at - self._block_start
        if not 0 <= start < len(self._block):
            stop = min(self._at + max(count, _READ_AHEAD), self._size)
            self._block, self._block_start, start = read_bytes(self._url, self._at, stop), self._at, 0
            if len(self._block) < stop - self._at:
                raise StoreError(f"{self._url}: was shortened while it was read")
        part = self._block[start : start + count]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


_READ_AHEAD = 4 << 20
"""Bytes of the smallest request for a part of an object."""


def _ask(url: str, method: str, **options: object) -> Any:
    store = file_system(url)
    try:
        return getattr(store, method)(url, **options)
    except FileNotFoundError:
        raise UserError(f"{url}: no such object") from None
    except Exception as error:  # each store raises errors of its own, such as network or permission errors
        # Without the error itself, whose text may show the keys of the URL.
        raise StoreError(f"{url}: cannot be read: {type(error).__name__}: {error}") from None


def version_of(url: str) -> str | None:
    """Returns a value that identifies the content of an object: its ETag, checksum, generation or the time of its last
    change; None if the store provides none of these. Raises UserError if the store cannot be read."""
    facts = {str(key).lower().replace("_", "").replace("-", ""): value for key, value in _ask(url, "info").items()}
    known = next((key for key in _VERSIONS if facts.get(key) not in (None, "")), None)
    return None if known is None else f"{known} {facts[known]}"


_VERSIONS = (
    "etag",
    "md5hash",
    "contentmd5",
    "md5",
    "checksum",
    "crc32c",
    "versionid",
    "generation",
    "mtime",
    "lastmodified",
    "modifiedat",
    "modificationtime",
    "updated",
    "created",
)
"""Keys of fsspec's `info`, in lower case without signs, whose value changes when an object is written again."""


def local_copy(url: str, folder: str | os.PathLike[str]) -> str:
    """Returns the path of an object's copy in a local folder. Makes the copy unless it exists. The copy's name contains
    the object's size and version (`version_of`), so an object that has changed is copied again. Without a version only
    the size is compared, and a warning says so."""
    version = version_of(url)
    name = hashlib.sha256(f"{url} {size_of(url)} {version}".encode()).hexdigest()[:32]
    path = Path(folder) / f"{name}-{url.rsplit('/', 1)[-1]}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        content = read_bytes(url)
        with open_atomically(path) as file:
            file.write(content)
    elif version is None:
        warn_on_first_rank(
            f"{url}: the store tells neither checksum nor time, so {path} is used because its size is the same; delete "
            "it if the object has changed"
        )
    return str(path)


class RemoteBin:
    """Reads tokens of an object by ranges of bytes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.size = size_of(url)

    def read(self, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns `count` tokens from byte `start` on. Raises UserError if the object does not have them."""
        if count == 0:
            return np.empty(0, dtype)
        data = read_bytes(self._url, start, start + count * dtype.itemsize)
        if len(data) < count * dtype.itemsize:
            raise UserError(f"{self._url}: was shortened while it was read")
        return np.frombuffer(data, dtype)
