"""A cache of index arrays on disk. Any process can load or build them; no process depends on a certain rank."""

import contextlib
import fcntl
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.utils.compiled import AST_LOCK
from megatron.core.utils.files import (
    open_atomically,
    open_regular_file,
    parse_json,
    read_regular_file,
    write_atomically,
)
from megatron.core.utils.warn import warn_on_first_rank

_IN_MEMORY_BELOW = 1 << 20  # bytes; larger arrays are mapped, each of which holds a file descriptor
_POLL_SECONDS = 0.1
_BLOCK_BYTES = 16 << 20
_THREADS = 4
_FORMS = "types and shapes"

Arrays = dict[str, np.ndarray]


class IndexCache:
    """One entry of the cache: `<folder>/<md5 of description>-<name>-<array>.npy`, and a .txt with the description.

    The description contains everything that the arrays depend on, including the digest of the data, so all processes
    write the same entry. Each file is written under a temporary name and renamed, the description last. So if the
    description exists, all files exist and are complete. Large arrays are synced to disk. Small arrays are not, because
    a run may have thousands of them. The description ends with the checksums of all arrays, and every load compares
    them, because a damaged order of samples would silently train on other samples. If the folder is not writable, one
    warning says so, and the arrays stay in memory.

    Args:
        folder: folder of the cache; None: no cache.
        name: such as "GPTDataset-train".
        description: the key.
        patience: seconds that a process waits for another one that builds the entry, before it builds it, too.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, name: str, description: str, patience: float = 300
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self._description = description
        self._patience = patience
        # Identifies the description; not for security.
        self._stem = f"{hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()}-{name}"

    def load(self, names: list[str]) -> Arrays | None:
        """Returns the arrays of the entry; None if it does not exist or is damaged. Large arrays are mapped
        read-only."""
        if self._folder is None:
            return None
        try:
            text = read_regular_file(self._path("description.txt")).decode()
            description, _, checksums = text.rpartition("\n")
            if description != self._description:
                return None
            expected = parse_json(checksums)
            if not isinstance(expected, dict):
                raise ValueError("its last line holds no checksums")
            arrays = {name: load_array(self._path(f"{name}.npy")) for name in names}
            if any(_checksums(array) != expected.get(name) for name, array in arrays.items()):
                raise ValueError("a checksum does not match")
            forms = expected.get(_FORMS, {})  # an older release did not write them
            if any(forms.get(name, _form(array)) != _form(array) for name, array in arrays.items()):
                raise ValueError("an array is of another type or shape than the one that was saved")
            return arrays
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged header of an array is read as Python, which raises many kinds of errors
            reason = str(error).partition("\n")[0]
            warn_on_first_rank(f"index cache {self._folder}/{self._stem}: not readable ({reason}); building it again")
            return None

    def save(self, arrays: Arrays) -> bool:
        """Writes the entry. Returns False, with a warning, if it cannot be written."""
        if self._folder is None:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, array in arrays.items():
                with open_atomically(self._path(f"{name}.npy"), sync=_is_large(array)) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
            facts: dict[str, Any] = {name: _checksums(array) for name, array in arrays.items()}
            checksums = json.dumps(facts | {_FORMS: {name: _form(array) for name, array in arrays.items()}})
            any_large = any(_is_large(array) for array in arrays.values())
            write_atomically(self._path("description.txt"), f"{self._description}\n{checksums}", sync=any_large)
        except OSError as error:
            self._warn_unwritable(error)
            return False
        return True

    def load_or_build(self, names: list[str], valid: Callable[[Arrays], bool], build: Callable[[], Arrays]) -> Arrays:
        """Returns the entry's arrays. Builds and saves them if there is no entry or `valid` rejects it.

        If several processes find no entry, one builds it and the others load what it saved. If it dies, the kernel
        releases its lock. If it takes longer than `patience`, the others build the arrays themselves.
        """
        found = self._load_valid(names, valid)
        if found is not None:
            return found
        with self._lock_for_building(lambda: self._path("description.txt").exists()):
            found = self._load_valid(names, valid)
            if found is not None:
                return found
            built = build()
            saved = self.save(built)
        # Load the saved arrays: processes of one machine share the memory of mapped files.
        return (self._load_valid(names, valid) if saved else None) or built

    def _load_valid(self, names: list[str], valid: Callable[[Arrays], bool]) -> Arrays | None:
        arrays = self.load(names)
        if arrays is not None and not valid(arrays):
            warn_on_first_rank(f"index cache {self._folder}/{self._stem}: damaged; building it again")
            with contextlib.suppress(OSError):  # of a folder that others own; nothing can be saved there either
                self._path("description.txt").unlink()
            return None
        return arrays

    @contextlib.contextmanager
    def _lock_for_building(self, done: Callable[[], bool]) -> Iterator[None]:
        """Enters when this process has the lock, when `done` returns True (another process has built), or when patience
        ends."""
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
            # A process that waits for the lock of a removed file still gets it. Two builders are harmless.
            self._path("lock").unlink(missing_ok=True)
            os.close(lock)

    def _open_lock(self) -> int | None:
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return os.open(self._path("lock"), os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            self._warn_unwritable(error)
            return None

    def _warn_unwritable(self, error: OSError) -> None:
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
    except OSError:  # the file system has no locks: all processes build
        return True
    return True


def load_array(path: Path) -> np.ndarray:
    """Returns the array of an .npy file: read if it is small, otherwise mapped read-only."""
    # numpy parses the header as a Python literal; several threads build data sets at once
    with open_regular_file(path) as file, AST_LOCK:
        if os.fstat(file.fileno()).st_size > _IN_MEMORY_BELOW:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        return np.load(file, allow_pickle=False)


def _form(array: np.ndarray) -> list[object]:
    """Returns type and shape of an array, as JSON values: one flipped bit of a header changes the order of bytes, and
    no byte."""
    return [array.dtype.str, list(array.shape)]


def _is_large(array: np.ndarray) -> bool:
    return array.nbytes > _IN_MEMORY_BELOW


def _checksums(array: np.ndarray) -> list[int]:
    """Returns the CRC-32 of each block of an array, computed by several threads (zlib releases Python's lock)."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    blocks = [content[start : start + _BLOCK_BYTES] for start in range(0, content.size, _BLOCK_BYTES)]
    if len(blocks) < 2:
        return [zlib.crc32(block.data) for block in blocks]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda block: zlib.crc32(block.data), blocks))
