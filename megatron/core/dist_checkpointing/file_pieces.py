"""Files as pieces of bytes, for sending them from one rank to another. Errors wait until the end, so that ranks stay in
step."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.exceptions import UserError

PIECE_BYTES = 16 << 20
"""Bytes that are sent at once."""

BUFFER_BYTES = 4 * PIECE_BYTES
"""Host memory of a rank that sends and receives files: while one piece is on its way, the next one is read and the one
before is written."""


class PieceBuffers:
    """Two pieces of host memory that take turns in a transfer of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._buffers = [torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8) for _ in range(2)]

    def next(self) -> Tensor:
        """Returns memory for the next piece; empty at the end."""
        self._buffers.reverse()
        piece = self._buffers[0][: min(self._left, PIECE_BYTES)]
        self._left -= piece.numel()
        return piece


class FileSender:
    """The bytes of some files, one file after the other, in pieces. A read that fails gives other bytes, and `finish`
    raises: the other ranks go on until then."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._left = [(path, 0, path.stat().st_size) for path in paths if path.stat().st_size]
        self._buffers = PieceBuffers(sum(size for _, _, size in self._left))
        self._error: UserError | None = None

    def next(self) -> Tensor:
        """Returns the next piece, in host memory; empty at the end. It is valid until the next call but one."""
        piece, at = self._buffers.next(), 0
        length = piece.numel()
        view = piece.numpy().data
        while at < length:
            path, begin, end = self._left.pop(0)
            count = min(length - at, end - begin)
            try:
                with open(path, "rb", buffering=0) as file:
                    file.seek(begin)
                    _read_all(file, view[at : at + count])
            except OSError as error:
                self._error = UserError(f"{path}: {error.strerror or error}")
            at += count
            if begin + count < end:
                self._left.insert(0, (path, begin + count, end))
        return piece

    def finish(self) -> None:
        """Raises UserError if a file could not be read."""
        if self._error is not None:
            raise self._error


def _read_all(file: io.FileIO, view: memoryview) -> None:
    """Fills the view from a file. Raises OSError at the file's end."""
    while len(view):
        count = file.readinto(view)
        if not count:
            raise OSError(f"the file has become {len(view)} bytes shorter")
        view = view[count:]


class FileReceiver:
    """Files that arrive one after the other; those that the folder already has are written over. A write that fails is
    remembered, and `finish` raises."""

    def __init__(self, disk: Disk, folder: Path, files: Sequence[tuple[str, int]]) -> None:
        self._disk = disk
        self._files = [(folder / name, size) for name, size in files]
        self._sizes = dict(self._files)
        self._open: BinaryIO | None = None
        self._error: OSError | None = None
        self.left = sum(size for _, size in files)
        """Bytes that are still to come."""

    def take(self, piece: Tensor) -> None:
        """Appends the next bytes."""
        self.left -= piece.numel()
        view = piece.numpy().data
        while len(view):
            path, missing = self._files.pop(0)
            part, view = view[:missing], view[missing:]
            try:
                if self._error is None:
                    self._append(path, part, last=len(part) == missing)
            except OSError as error:
                self._error = error
            if len(part) < missing:
                self._files.insert(0, (path, missing - len(part)))

    def _append(self, path: Path, part: memoryview, last: bool) -> None:
        self._open = self._open or self._disk.create_over(path, self._sizes[path])
        self._disk.write(self._open, part)
        if last:
            self._disk.sync(self._open)
            self._open.close()
            self._open = None

    def finish(self) -> None:
        """Raises OSError if a write failed."""
        if self._open is not None:
            self._open.close()
        if self._error is not None:
            raise self._error
