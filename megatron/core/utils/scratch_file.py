"""A file of a local folder that one process uses as memory: aligned blocks, direct I/O, a checksum for each block.

The content is worthless after the process has ended. The process removes its file at a regular end. The file that a
killed process left is removed by the next one that uses the folder: its lock (flock) is free then. Direct I/O
(O_DIRECT) leaves the page cache alone; on a file system without it the file is read and written as usual.
"""

import contextlib
import errno
import fcntl
import os
import re
import time
import weakref
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron.core.exceptions import UserError

BLOCK = 4096
"""Direct I/O needs memory, offsets and sizes that are multiples of this, in bytes."""
_NAME = re.compile(r"(?:optimizer-state|weights)-rank(\d+)-pid(\d+)-[0-9a-f]{8}\.scratch")
_NETWORK = re.compile(r"nfs\d?|cifs|smb\w*|lustre|ceph|gpfs|beegfs|wekafs|afs|fuse\.(?!fuse-overlayfs|mergerfs)\S+")
_SECONDS = 10.0
"""Children of a killed process may hold its lock for some seconds."""
_ADVICE = "Resume from the last checkpoint, which does not need the file"


def padded(nbytes: int) -> int:
    """Returns the number of bytes in whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def aligned_memory(nbytes: int, pinned: bool = False) -> Tensor:
    """Returns host memory (uint8) for direct I/O, page-locked if `pinned`. Takes one block more than `nbytes`."""
    memory = torch.empty(nbytes + BLOCK, dtype=torch.uint8, pin_memory=pinned)
    first = -memory.data_ptr() % BLOCK
    return memory[first : first + nbytes]


class ScratchFile:
    """A file of this process in a local folder. Several threads may read and write different blocks at once.

    Raises UserError if the folder is missing, cannot be written, or is on a network file system, if the disk is full,
    and if another run uses the folder: one with a live process of the same rank.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        flag: str = "--optimizer-nvme-offload-path",
        content: Literal["optimizer-state", "weights"] = "optimizer-state",
    ) -> None:
        """`flag` gave the folder, which errors say."""
        self.folder, self.flag, self.content = Path(folder), flag, content
        self.nbytes = 0
        self._sums: dict[int, int] = {}
        """The checksum of the bytes at each offset that was written."""
        if not self.folder.is_dir():
            raise self._error("there is no such folder: make it on a local disk of every machine")
        kind = file_system_of(self.folder)
        if _NETWORK.fullmatch(kind):
            raise self._error(f"it is on a network file system ({kind}): give a folder on a local disk")
        try:
            self._descriptor, self.path = _created(self.folder, f"{content}-rank{rank}-pid{os.getpid()}")
        except OSError as error:
            raise self._error(f"cannot create a file there: {error.strerror}") from None
        self.close = weakref.finalize(self, _remove, self._descriptor, self.path, os.getpid())
        """Removes the file. It is called at the end of the process too."""
        try:
            self._remove_stale_files(rank)
            self.is_direct = self._make_direct()
        except OSError as error:
            self.close()
            raise self._error(f"cannot use {self.path.name}: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.flag} {self.folder}: {problem}")

    def _remove_stale_files(self, rank: int) -> None:
        """Removes the files of dead processes. Own file and lock exist already, so that of two runs that begin at the
        same time at least one sees the other."""
        end = time.monotonic() + _SECONDS
        for path in sorted(self.folder.iterdir()):
            name = _NAME.fullmatch(path.name)
            if name is None or path == self.path:
                continue
            while not _removed_if_unlocked(path):
                if int(name[1]) != rank or int(name[2]) == os.getpid():
                    break  # another rank, or another file of this process
                if time.monotonic() > end:
                    raise self._error(
                        f"another run uses this folder (process {name[2]}, rank {rank}, {path.name}): give each run a "
                        "folder of its own, or end the other run"
                    )
                time.sleep(0.1)

    def _make_direct(self) -> bool:
        """Writes the first block, with direct I/O if the file system has it. Returns whether it has."""
        what = self.content.capitalize().replace("-", " ")
        text = f"{what} of a training run. Checkpoints do not need it; remove it when no run uses it.\n".encode()
        self.reserve(BLOCK)
        memory = aligned_memory(BLOCK)
        memory.zero_()[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        for direct in (getattr(os, "O_DIRECT", 0), 0):
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | direct)
                os.pwritev(self._descriptor, [memory.numpy().data], 0)
                return bool(direct)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
        raise AssertionError("a file is direct or not")

    def reserve(self, nbytes: int) -> int:
        """Takes space on the disk, so that no later write finds it full. Returns the offset of the first byte."""
        first, self.nbytes = self.nbytes, self.nbytes + padded(nbytes)
        try:
            if first < self.nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, first, self.nbytes - first)
        except OSError as error:
            free = os.statvfs(self.folder)
            raise self._error(
                f"{error.strerror}: this rank has {first:,} bytes and needs {self.nbytes - first:,} more, "
                f"{free.f_bavail * free.f_frsize:,} are free; --dry-run tells the bytes of every rank"
            ) from None
        return first

    def write(self, offset: int, memory: Tensor) -> None:
        """Writes whole blocks from aligned memory. Raises UserError if the disk fails."""
        self._sums[offset] = checksum(memory)
        self._transfer(offset, memory, write=True)

    def read(self, offset: int, memory: Tensor) -> None:
        """Reads what the last `write` at this offset wrote, of the same size, into aligned memory. Raises UserError if
        the disk fails or returns other bytes."""
        self._transfer(offset, memory, write=False)
        if checksum(memory) != self._sums[offset]:
            raise self._error(
                f"{self.path.name} does not hold the bytes that were written at {offset:,}: the disk fails, or another "
                f"program has changed the file. {_ADVICE}; give a folder on another disk if it happens again"
            )

    def _transfer(self, offset: int, memory: Tensor, write: bool) -> None:
        call, done, view = os.pwritev if write else os.preadv, 0, memory.numpy().data
        while done < len(view):
            try:
                count = call(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                verb = "written" if write else "read"
                raise self._error(f"{self.path.name} cannot be {verb}: {error.strerror}. {_ADVICE}") from None
            if count == 0:
                raise self._error(f"{self.path.name} has been cut at {offset + done:,} bytes. {_ADVICE}")
            done += count


def checksum(memory: Tensor) -> int:
    """Returns a checksum of whole blocks (uint8): sums of their 64-bit words, times a different odd number for each
    block, modulo 2^64. One changed word and blocks in another order are seen, at the speed of memory."""
    sums = memory.view(torch.int64).view(-1, BLOCK // 8).sum(1)
    return int((sums * (2 * torch.arange(len(sums)) + 1)).sum())


def file_system_of(folder: Path) -> str:
    """Returns the type of the file system of a folder, such as ext4; "" where Linux's list of mounts is missing."""
    found, best = "", -1
    place = folder.resolve()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            mounted, _, kind = line.partition(" - ")
            point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mounted.split()[4]))
            if place.is_relative_to(point) and len(point.parts) >= best:  # of mounts at one place the last counts
                found, best = kind.split()[0], len(point.parts)
    return found


def _created(folder: Path, stem: str) -> tuple[int, Path]:
    """Creates a file with a new name and locks it. Returns its descriptor and its path. Raises OSError."""
    while True:
        path = folder / f"{stem}-{os.urandom(4).hex()}.scratch"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # not removed as a dead process's file before it was locked
                return descriptor, path
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)


def _removed_if_unlocked(path: Path) -> bool:
    """Removes a file unless a process has locked it. Returns whether the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(descriptor: int, path: Path, process: int) -> None:
    """Closes and removes the file, in the process that made it; a fork only closes its copy."""
    if os.getpid() == process:
        path.unlink(missing_ok=True)
    os.close(descriptor)
