"""Every change that a save makes on disk, one method each, so that a test can stop a process at any of them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from megatron.core.exceptions import UserError
from megatron.core.utils.files import sync_directory

_WRITE_BUFFER = 1 << 20
"""Small tensors share a system call; anything larger goes past the buffer."""


def _no_hook(operation: str, path: Path) -> None:
    pass


class Disk:
    """The file system of one rank. `before(operation, path)` is called ahead of each change."""

    def __init__(self, before: Callable[[str, Path], None] = _no_hook) -> None:
        self.before = before

    def make_directory(self, path: Path) -> None:
        self.before("make_directory", path)
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """A new file to write to; one that exists is an error."""
        self.before("create", path)
        return open(path, "xb", buffering=_WRITE_BUFFER)

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        self.before("write", Path(file.name))
        file.write(content)

    def sync(self, file: BinaryIO) -> None:
        """Returns once everything written to the file survives a power cut."""
        self.before("sync", Path(file.name))
        file.flush()
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Returns once the names in the directory survive a power cut."""
        self.before("sync_directory", path)
        sync_directory(path)

    def rename(self, path: Path, target: Path) -> None:
        """Move a file over another, or a directory to a free name, in one step."""
        self.before("rename", path)
        os.replace(path, target)

    def remove_tree(self, path: Path) -> None:
        self.before("remove_tree", path)
        shutil.rmtree(path)

    def write_file(self, path: Path, content: bytes) -> None:
        """A new, synced file with this content."""
        with self.create(path) as file:
            self.write(file, content)
            self.sync(file)

    def replace_file(self, path: Path, content: bytes) -> None:
        """Give the file at `path` this content in one step: readers see the old or the new."""
        aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        try:
            self.write_file(aside, content)
            self.rename(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        self.sync_directory(path.parent)


def cannot_write(path: Path, error: OSError) -> UserError:
    """What a user is told when a change fails that a save wanted to make at `path`."""
    reason = error.strerror or error
    return UserError(f"{error.filename or path}: {reason}; this checkpoint is not written, earlier ones are untouched")
