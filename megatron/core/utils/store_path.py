"""Paths of objects in a store, which are used as paths of files are: `s3://bucket/run` / "manifest.json"."""

import errno
import io
import os
import stat
import time
from collections.abc import Callable, Generator
from pathlib import Path, PosixPath
from typing import NoReturn, TypeVar

from megatron.core.exceptions import UserError
from megatron.core.utils.stores import Store, StoreError, file_system, is_url
from megatron.core.utils.url_keys import hide_keys

T = TypeVar("T")

_TRIES = 3
_PAUSE = 0.2
"""Seconds before the second try of a request; each further pause is twice as long."""
_OF_FILES = ("file:", "local:")
_REFUSED = ("expired", "credential", "access denied", "accessdenied", "forbidden", "unauthorized", "invalid token")


def place(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a flag's value: a StorePath for a URL such as s3://bucket/run, otherwise a Path."""
    if isinstance(path, StorePath):
        return path
    return StorePath(path) if is_url(path) else Path(path)


def local_folder(flag: str, path: str) -> Path:
    """Returns the path of a folder that a tool writes. Raises UserError, naming the flag, for the URL of a store."""
    if is_url(path):
        raise UserError(f"{flag} {path}: this tool writes a folder on disk; give one, and copy it into the store")
    return Path(path)


class StorePath(PosixPath):
    """The URL of an object or of a folder of objects.

    A missing object is FileNotFoundError, as with files. All other failures are StoreError, after a few tries: what a
    store does not give now is not broken. Objects are as the store has them at each call; listings may lag behind.
    """

    __slots__ = ()

    def __str__(self) -> str:
        scheme, colon, rest = super().__str__().partition(":/")
        if not colon:
            return scheme
        return f"{scheme}://{'/' if scheme + ':' in _OF_FILES else ''}{rest}"

    __fspath__ = __str__

    @property
    def store(self) -> Store:
        """The fsspec file system, without what it remembers of earlier listings."""
        store = file_system(str(self))
        store.invalidate_cache()
        return store

    def ask(self, question: Callable[[Store, str], T]) -> T:
        """Returns the answer to a request, given the file system and the URL. Tries a few times."""
        for attempt in range(_TRIES):
            try:
                return question(self.store, str(self))
            except FileNotFoundError:
                raise FileNotFoundError(errno.ENOENT, "no such object", str(self)) from None
            except StoreError:
                raise
            except Exception as error:  # each store raises errors of its own
                if attempt == _TRIES - 1 or is_refusal(error):
                    raise StoreError(f"{self}: {reason_of(error)}") from None
                time.sleep(_PAUSE * 2**attempt)
        raise AssertionError

    def info(self) -> dict[str, object]:
        """Returns what the store says about an object or folder: size, type and others."""
        return self.ask(lambda store, url: dict(store.info(url)))

    def exists(self, **_: object) -> bool:
        """Whether there is such an object or folder."""
        return self._type() is not None

    def is_dir(self, **_: object) -> bool:
        """Whether the URL is a folder."""
        return self._type() == "directory"

    def is_file(self, **_: object) -> bool:
        """Whether the URL is an object."""
        return self._type() == "file"

    def is_symlink(self) -> bool:
        """Objects are no links."""
        return False

    def _type(self) -> str | None:
        try:
            return str(self.info()["type"])
        except FileNotFoundError:
            return None

    def stat(self, **_: object) -> os.stat_result:
        """Returns size, kind and time of the last change; the time is 0 if the store does not tell it."""
        info = self.info()
        try:
            changed = self.ask(lambda store, url: store.modified(url).timestamp())
        except (StoreError, FileNotFoundError):  # a folder, or a store without times
            changed = 0.0
        mode = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
        values = (mode, 0, 0, 0, 0, 0, int(str(info["size"] or 0)), int(changed), int(changed), int(changed))
        return os.stat_result(values, {"st_mtime_ns": int(changed * 1e9)})

    def iterdir(self) -> Generator["StorePath", None, None]:
        """Yields what is in the folder, as the store lists it."""
        names = self.ask(lambda store, url: [str(path) for path in store.ls(url, detail=False)])
        found = dict.fromkeys(path.rstrip("/").rsplit("/", 1)[-1] for path in names)
        return (self / name for name in found if name not in ("", self.name) or (self / name).exists())

    def glob(self, pattern: str, **_: object) -> Generator["StorePath", None, None]:  # type: ignore[override]
        """Yields the objects and folders that fit a pattern, as the store lists them."""
        found = self.ask(lambda store, url: [store.unstrip_protocol(p) for p in store.glob(f"{url}/{pattern}")])
        return (StorePath(url) for url in found)

    def absolute(self) -> "StorePath":
        """Returns the path: a URL is absolute."""
        return self

    def resolve(self, strict: bool = False) -> "StorePath":
        """Returns the path: there are no links."""
        return self

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes an object."""
        try:
            self.ask(lambda store, url: store.rm_file(url))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def read_bytes(self) -> bytes:
        """Returns the content of an object."""
        return self.ask(lambda store, url: bytes(store.cat_file(url)))

    def open(self, *_: object, **__: object) -> NoReturn:
        """Raises OSError: objects are read by `open_object`, and written as a whole."""
        raise OSError(errno.EOPNOTSUPP, "an object of a store is not opened as a file", str(self))

    def open_object(self) -> "ObjectFile":
        """Opens an object for reading at any place."""
        return ObjectFile(self)


class ObjectFile(io.RawIOBase):
    """An object that is read by ranges of bytes: each read is one request."""

    def __init__(self, path: StorePath) -> None:
        super().__init__()
        self._path, self._at = path, 0
        self._size = int(str(path.info()["size"] or 0))

    def readable(self) -> bool:
        """Whether the file can be read."""
        return True

    def seekable(self) -> bool:
        """Whether `seek` works."""
        return True

    def tell(self) -> int:
        """Returns the position of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Sets the position of the next byte."""
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fills the buffer with the next bytes. Returns their number, 0 at the end."""
        start, stop = self._at, min(self._at + len(buffer), self._size)
        if stop <= start:
            return 0
        content = self._path.ask(lambda store, url: store.cat_file(url, start=start, end=stop))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def readall(self) -> bytes:
        """Returns the rest of the object, by one request."""
        rest = bytearray(max(self._size - self._at, 0))
        return bytes(rest[: self.readinto(rest)])


def is_refusal(error: Exception) -> bool:
    """Whether a store refuses access, so that the same request would fail again."""
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, PermissionError) or any(word in text for word in _REFUSED)


def reason_of(error: Exception) -> str:
    """Says why a request to a store has failed."""
    if is_refusal(error):
        return hide_keys(f"the store refuses access ({error or type(error).__name__}); renew the credentials")
    return hide_keys(f"the store does not answer as expected ({type(error).__name__}: {error})")
