"""Index arrays kept on disk: found whole by any process, or built by it, without anyone waiting for a certain rank."""

import contextlib
import fcntl
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron.core.utils.files import open_atomically, write_atomically
from megatron.core.utils.warn import warn_on_first_rank

_IN_MEMORY_BELOW = 1 << 20  # bytes; larger arrays are mapped, each of which holds a file descriptor
_POLL_SECONDS = 0.1

Arrays = dict[str, np.ndarray]


class IndexCache:
    """Arrays under `<folder>/<md5 of description>-<name>-<array>.npy`, with the description beside them in a .txt.

    The description must hold everything that the arrays depend on, the digest of the data included, so that whoever
    writes an entry writes the same. Every file is written aside and renamed, the description last: where that is, all
    files are, and whole. Large arrays are synced to disk; small ones, of which a run may have thousands, are not waited
    for but have a checksum. A folder that cannot be written is no error: it is said once, and the arrays stay in
    memory.

    Args:
        folder: where entries are kept; None: nowhere.
        name: such as "GPTDataset-train".
        description: the key.
        patience: seconds for which a process leaves the building to another one that is at it, before it builds too.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, name: str, description: str, patience: float = 300
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self._description = description
        self._patience = patience
        # An identifier of the description, not a protection against anybody.
        self._stem = f"{hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()}-{name}"

    def load(self, names: list[str]) -> Arrays | None:
        """The arrays of an entry that is whole, else None. Large ones are mapped read-only."""
        if self._folder is None:
            return None
        try:
            description, _, checksums = self._path("description.txt").read_text(encoding="utf-8").rpartition("\n")
            if description != self._description:
                return None
            expected = json.loads(checksums)
            arrays = {name: load_array(self._path(f"{name}.npy")) for name in names}
            if any(_checksum(array) != expected.get(name) for name, array in arrays.items()):
                raise ValueError("a checksum does not fit")
            return arrays
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            warn_on_first_rank(f"index cache {self._folder}/{self._stem}: not readable ({error}); building it again")
            return None

    def save(self, arrays: Arrays) -> bool:
        """Write an entry; False, with a warning, where that is not possible."""
        if self._folder is None:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, array in arrays.items():
                with open_atomically(self._path(f"{name}.npy"), sync=_is_large(array)) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
            checksums = json.dumps({name: _checksum(array) for name, array in arrays.items()})
            any_large = any(_is_large(array) for array in arrays.values())
            write_atomically(self._path("description.txt"), f"{self._description}\n{checksums}", sync=any_large)
        except OSError as error:
            self._say_unwritable(error)
            return False
        return True

    def load_or_build(self, names: list[str], valid: Callable[[Arrays], bool], build: Callable[[], Arrays]) -> Arrays:
        """The entry's arrays, built and saved if there is none or if `valid` refuses what is there.

        Of several processes that find nothing, one builds and the others take what it saved. They hold on to no promise
        of its: should it die, the kernel releases its lock; should it take longer than `patience`, they build as well.
        """
        found = self._load_valid(names, valid)
        if found is not None:
            return found
        with self._turn_to_build(lambda: self._path("description.txt").exists()):
            found = self._load_valid(names, valid)
            if found is not None:
                return found
            built = build()
            saved = self.save(built)
        # What was saved is loaded again: mapped files share their memory with all processes of the machine.
        return (self._load_valid(names, valid) if saved else None) or built

    def _load_valid(self, names: list[str], valid: Callable[[Arrays], bool]) -> Arrays | None:
        arrays = self.load(names)
        if arrays is not None and not valid(arrays):
            warn_on_first_rank(f"index cache {self._folder}/{self._stem}: damaged; building it again")
            self._path("description.txt").unlink(missing_ok=True)
            return None
        return arrays

    @contextlib.contextmanager
    def _turn_to_build(self, done: Callable[[], bool]) -> Iterator[None]:
        """Return when this process holds the lock, when `done` (another process built), or when patience ends."""
        lock = self._open_lock()
        if lock is None:
            yield
            return
        try:
            deadline = time.monotonic() + self._patience
            while not _try_to_lock(lock) and not done() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            # Whoever waits for the lock of a removed file gets it all the same; nothing relies on a sole builder.
            self._path("lock").unlink(missing_ok=True)
            os.close(lock)

    def _open_lock(self) -> int | None:
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return os.open(self._path("lock"), os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            self._say_unwritable(error)
            return None

    def _say_unwritable(self, error: OSError) -> None:
        warn_on_first_rank(
            f"index cache {self._folder}: cannot be written ({error.strerror}); indices are built in the memory of "
            "each process. --data-cache-path names another folder"
        )

    def _path(self, suffix: str) -> Path:
        assert self._folder is not None
        joint = "." if suffix == "lock" else "-"
        return self._folder / f"{self._stem}{joint}{suffix}"


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks: everyone builds
        return True
    return True


def load_array(path: Path) -> np.ndarray:
    """The array of an .npy file: read if it is small, else mapped read-only."""
    large = path.stat().st_size > _IN_MEMORY_BELOW
    return np.load(path, mmap_mode="r" if large else None, allow_pickle=False)


def _is_large(array: np.ndarray) -> bool:
    return array.nbytes > _IN_MEMORY_BELOW


def _checksum(array: np.ndarray) -> int | None:
    """Of a small array; large ones are not read to be checked."""
    return None if _is_large(array) else zlib.crc32(array.tobytes())
