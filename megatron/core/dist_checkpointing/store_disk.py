"""Saves into an object store. There are no renames: a checkpoint is complete once its manifest, written last, exists.

The objects of a save have a mark in their names that no other save uses (`rank_00000-1a2b3c4d.safetensors`). The
manifest names them, so a save never changes objects of a complete checkpoint. One of the same iteration is replaced in
one step, when the new manifest replaces the old one. A killed save leaves marked objects that no manifest names.
"""

import errno
import io
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.exceptions import UserError
from megatron.core.utils.store_path import StorePath, reason_of
from megatron.core.utils.stores import Store

T = TypeVar("T")

MARKED = re.compile(r"rank_\d{5,}-[0-9a-f]{8}\.(safetensors|json)")
"""Names of a save's objects, except for its manifest."""

_PART_BYTES = 32 << 20
"""Bytes of a part of an upload. A store takes at most 10000 parts for an object."""
_PARTS = 4
"""Parts that are given to the store at once, which may send them at the same time."""


class StoreDisk(Disk):
    """Writes objects. A failure of the store is OSError, as that of a disk is."""

    def new_folder(self, folder: Path) -> Path:
        """Returns the folder itself, and makes a new mark for the names in it."""
        self.make_directory(folder)
        self.mark = f"-{os.urandom(4).hex()}"
        return folder

    def make_directory(self, path: Path) -> None:
        """Creates a directory where the store is a file system; others have none."""
        self.before("make_directory", path)
        if str(path).startswith(("file:", "local:")):
            _change(path, lambda store, url: store.makedirs(url, exist_ok=True))

    def create(self, path: Path) -> BinaryIO:
        """Begins the upload of an object, which exists once `sync` has returned."""
        self.before("create", path)
        return cast(BinaryIO, _Upload(path))

    def sync(self, file: BinaryIO) -> None:
        """Ends an upload. Raises OSError if the store then has another number of bytes."""
        self.before("sync", Path(file.name))
        cast(_Upload, file).finish()

    def sync_directory(self, path: Path) -> None:
        """Does nothing: an object that is written stays."""
        self.before("sync_directory", path)

    def write_file(self, path: Path, content: bytes) -> None:
        """Writes an object in one step. An existing one is replaced."""
        self.before("write", path)
        _change(path, lambda store, url: store.pipe_file(url, content))
        _check_size(path, len(content))

    replace_file = write_file

    def remove_tree(self, path: Path) -> None:
        """Deletes a folder with everything in it, its manifest first."""
        self.before("remove_tree", path)
        manifest = path / "manifest.json"
        with suppress(FileNotFoundError):
            _change(manifest, lambda store, url: store.rm_file(url))
        with suppress(FileNotFoundError):
            _change(path, lambda store, url: store.rm(url, recursive=True))

    def discard(self, folder: Path) -> None:
        """Deletes the objects of the current save, as far as the store lets it. Does not raise.

        It keeps them if a manifest names them: the store may have written it although its answer was lost."""
        with suppress(OSError, UserError):
            with suppress(FileNotFoundError):
                if self.mark.encode() in (folder / "manifest.json").read_bytes():
                    return
            self.remove_objects([path for path in folder.iterdir() if f"{self.mark}." in path.name])

    def discard_others(self, folder: Path) -> None:
        """Deletes the objects of other saves in the folder of the current one, as far as the store lets it."""
        with suppress(OSError, UserError):
            others = [path for path in folder.iterdir() if MARKED.fullmatch(path.name)]
            self.remove_objects([path for path in others if f"{self.mark}." not in path.name])

    def remove_objects(self, paths: list[Path]) -> None:
        """Deletes objects; one that does not exist is no error."""
        for path in paths:
            self.before("remove_tree", path)
            with suppress(FileNotFoundError):
                _change(path, lambda store, url: store.rm_file(url))


def disk_at(path: Path) -> Disk:
    """Returns the access for saves at a path."""
    return StoreDisk() if isinstance(path, StorePath) else Disk()


class _Upload(io.RawIOBase):
    """An object that is being uploaded in parts. Without `finish` it does not come into existence."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.name = str(path)
        self._path, self._size, self._waiting = path, 0, bytearray()
        self._file: Store = _change(path, lambda store, url: store.open(url, "wb", block_size=_PART_BYTES))

    def writable(self) -> bool:
        """Whether the file can be written."""
        return True

    def write(self, content: bytes | memoryview) -> int:  # type: ignore[override]
        """Appends bytes."""
        self._waiting += content
        self._size += len(content)
        if len(self._waiting) >= _PARTS * _PART_BYTES:
            self._send()
        return len(content)

    def finish(self) -> None:
        """Sends the rest, and has the store make the object."""
        self._send()
        _change(self._path, lambda store, url: self._file.close())
        self._file = None
        _check_size(self._path, self._size)

    def _send(self) -> None:
        # A part must not be sent twice, so there is one try; the store's package has its own.
        _change(self._path, lambda store, url: self._file.write(bytes(self._waiting)))
        self._waiting.clear()

    def close(self) -> None:
        """Gives an upload up that is not finished."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):
                file.discard()  # not close(), which would make an object of the parts
            file.closed = True
        super().close()


def _change(path: Path, change: Callable[[Store, str], T]) -> T:
    """Makes a change, and turns each error of a store into OSError."""
    assert isinstance(path, StorePath)
    try:
        return change(path.store, str(path))
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, f"no such object or bucket ({error})", str(path)) from None
    except UserError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, reason_of(error), str(path)) from None


def _check_size(path: Path, size: int) -> None:
    stored = path.stat().st_size
    if stored != size:
        raise OSError(errno.EIO, f"the store has {stored} of {size} bytes of it", str(path))
