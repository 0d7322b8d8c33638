"""The changes that a save makes on disk. Each is one method, so that a test can stop a process before any of them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from megatron.core.exceptions import UserError
from megatron.core.utils.files import sync_directory
from megatron.core.utils.store_path import StorePath

_WRITE_BUFFER = 1 << 20
"""Bytes that are buffered before a system call. Larger writes bypass the buffer."""


def _no_hook(operation: str, path: Path) -> None:
    pass


def check_room(folder: Path, nbytes: float) -> str | None:
    """Returns a warning if the file system of a folder, which may not exist yet, has less than `nbytes` free: something
    else may free space until the save, or the file system may report its free space wrongly. Raises UserError if the
    whole file system is smaller. Returns None if it has room, or if it reports no size, as stores do."""
    if isinstance(folder, StorePath):
        return None
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(existing)
    room = usage.total - usage.used  # not usage.free, which leaves out what only root can write
    if not usage.total or room >= nbytes:
        return None
    takes = f"--save {folder}: a checkpoint takes {nbytes / 1e6:,.1f} MB, and "
    if usage.total < nbytes:
        raise UserError(f"{takes}the whole file system there has {usage.total / 1e6:,.1f} MB; give another path")
    return f"{takes}{room / 1e6:,.1f} MB are free there; free space before the first save, which fails otherwise"


class Disk:
    """File system access of one rank. Calls `before(operation, path)` before each change. All methods raise OSError."""

    def __init__(self, before: Callable[[str, Path], None] = _no_hook) -> None:
        self.before = before
        self.mark = ""
        """Part of the names of a save's files, equal on all its ranks (`StoreDisk`)."""

    def new_folder(self, folder: Path) -> Path:
        """Creates the folder that a save of `folder` writes into, and returns its path."""
        temporary = folder.with_name(f"{folder.name}.tmp-{os.urandom(4).hex()}")
        self.make_directory(temporary)
        return temporary

    def discard(self, folder: Path) -> None:
        """Deletes the folder of a save that has failed, as far as that works. Does not raise."""
        shutil.rmtree(folder, ignore_errors=True)

    def make_directory(self, path: Path) -> None:
        """Creates a directory and its parents, unless they exist."""
        self.before("make_directory", path)
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """Creates a file and opens it for writing. Raises FileExistsError if it exists."""
        self.before("create", path)
        return open(path, "xb", buffering=_WRITE_BUFFER)

    def create_over(self, path: Path, size: int) -> BinaryIO:
        """Opens a file for writing from its first byte on, and creates it if there is none. Of an existing file up to
        `size` bytes stay, to be written over: the first write to new pages of memory takes several times as long."""
        self.before("create", path)

        def open_and_cut(name: str, flags: int) -> int:
            descriptor = os.open(name, flags & ~os.O_TRUNC, 0o666)
            if os.fstat(descriptor).st_size > size:
                os.ftruncate(descriptor, size)
            return descriptor

        return open(path, "wb", buffering=_WRITE_BUFFER, opener=open_and_cut)

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        """Appends bytes to an open file."""
        self.before("write", Path(file.name))
        file.write(content)

    def sync(self, file: BinaryIO) -> None:
        """Returns when everything written to the file would survive a power cut."""
        self.before("sync", Path(file.name))
        file.flush()
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Returns when the names in the directory would survive a power cut."""
        self.before("sync_directory", path)
        sync_directory(path)

    def rename(self, path: Path, target: Path) -> None:
        """Renames a file (replacing the target) or a directory (to an unused name), in one step."""
        self.before("rename", path)
        os.replace(path, target)

    def remove_tree(self, path: Path) -> None:
        """Deletes a directory with everything in it. If the path is a symbolic link, deletes only the link."""
        self.before("remove_tree", path)
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)

    def remove_file(self, path: Path) -> None:
        """Deletes a file."""
        self.before("remove_file", path)
        path.unlink()

    def write_file(self, path: Path, content: bytes) -> None:
        """Creates a file with this content and syncs it."""
        with self.create(path) as file:
            self.write(file, content)
            self.sync(file)

    def replace_file(self, path: Path, content: bytes) -> None:
        """Replaces the content of a file in one step, so that readers see the old or the new content."""
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        try:
            self.write_file(temporary, content)
            self.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.sync_directory(path.parent)


def cannot_point(tracker: Path, folder: Path, error: OSError) -> UserError:
    """Returns the error for a tracker file that cannot name the checkpoint that was just written."""
    reason = error.strerror or error
    return UserError(f"{tracker}: {reason}; {folder} is complete, and a load finds it, but this file does not name it")


def cannot_write(path: Path, error: OSError) -> UserError:
    """Returns the error for a failed change at `path` during a save."""
    reason = error.strerror or error
    return UserError(f"{error.filename or path}: {reason}; this checkpoint is not written, earlier ones are untouched")
