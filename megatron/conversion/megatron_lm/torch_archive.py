"""Reads files that torch.save wrote: the object as inert data, and tensors by ranges, without torch's unpickler.

The file is a zip archive whose entries are stored as they are. `data.pkl` holds the object; `data/KEY` the memory of
tensors. Compressed entries are refused, so an archive never needs more memory than its size.
"""

import io
import math
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.inert_pickle import MAX_PICKLE_BYTES, Name, Storage, read_pickle, shown
from megatron.core.exceptions import UserError

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
DTYPES = {str(dtype): dtype for dtype in [*_STORAGES.values(), torch.float8_e4m3fn, torch.float8_e5m2]}
"""Types of tensors by name."""
_BLOCK = 16 << 20
_MAX_DIMS = 16


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in an archive, whose elements have not been read."""

    archive: "TorchArchive"
    storage: Storage
    dtype: torch.dtype
    offset: int
    """First element in the storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Returns the elements [begin, end) in row-major order, one-dimensional. Raises UserError if the file is
        damaged."""
        end = self.numel if end is None else end
        assert 0 <= begin <= end <= self.numel, (begin, end, self.shape)
        if begin == end:
            return torch.empty(0, dtype=self.dtype)
        if self.strides != _row_major(self.shape):
            last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
            whole = self.archive.elements(self.storage, self.dtype, self.offset, self.offset + last + 1)
            return whole.as_strided(self.shape, self.strides).contiguous().view(-1)[begin:end]
        return self.archive.elements(self.storage, self.dtype, self.offset + begin, self.offset + end)


class TorchArchive:
    """A file that torch.save wrote, or a part of a larger file. Keeps no file open."""

    def __init__(self, path: Path, begin: int = 0, length: int | None = None) -> None:
        self.path = path
        try:
            size = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
        self.begin, self.length = begin, size - begin if length is None else length
        if begin < 0 or self.length < 0 or begin + self.length > size:
            raise UserError(f"{path}: bytes {begin} to {begin + self.length} are wanted of {size}")
        self._checked: set[str] = set()
        self._members = self._read_directory()

    def load(self) -> Any:
        """Returns the object: plain data, `Inert` records, and `StoredTensor`s. Raises UserError for anything
        unusual."""
        place, size, _ = self._member("data.pkl")
        if size > MAX_PICKLE_BYTES:
            raise UserError(f"{self.path}: data.pkl has {size} bytes; at most {MAX_PICKLE_BYTES} are read")
        with self._open() as file:
            file.seek(place)
            content = file.read(size)
        make = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": lambda arguments: arguments[0],
        }
        return read_pickle(content, str(self.path), make)

    def elements(self, storage: Storage, dtype: torch.dtype, begin: int, end: int) -> Tensor:
        """Returns the elements [begin, end) of a storage. Verifies the storage's checksum when it is first read."""
        name = f"data/{storage.key}"
        place, size, checksum = self._member(name)
        if end * dtype.itemsize > size:
            raise UserError(f"{self.path}: {name} has {size} bytes, a tensor needs {end * dtype.itemsize}")
        self._check(name, place, size, checksum)
        content = bytearray((end - begin) * dtype.itemsize)
        with self._open() as file:
            file.seek(place + begin * dtype.itemsize)
            if file.readinto(content) != len(content):  # type: ignore[attr-defined]
                raise UserError(f"{self.path}: {name} is cut off")
        return torch.frombuffer(content, dtype=dtype)

    def _tensor(self, arguments: tuple[Any, ...], dtype: torch.dtype | None = None) -> StoredTensor:
        storage, offset, shape, strides, *_ = arguments
        if not isinstance(storage, Storage) or (dtype is None and storage.kind not in _STORAGES):
            raise UserError(f"a tensor of {getattr(storage, 'kind', 'something that is no storage')}")
        numbers = (offset, *shape[:_MAX_DIMS], *strides[:_MAX_DIMS])
        sound = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        if not sound or len(shape) != len(strides) or len(shape) > _MAX_DIMS:
            raise UserError(f"a tensor of shape {shown(shape)} with strides {shown(strides)}")
        found = dtype or _STORAGES[storage.kind]
        spans = zip(shape, strides, strict=True)
        last = offset + sum((size - 1) * stride for size, stride in spans) if math.prod(shape) else offset - 1
        numel = storage.numel if dtype is None else storage.numel // found.itemsize
        if last >= numel or math.prod(shape) > numel:  # also no repeated elements: memory never exceeds the file's
            raise UserError(f"a tensor of shape {list(shape)} at {offset} in a storage of {numel} elements")
        return StoredTensor(self, storage, found, offset, tuple(shape), tuple(strides))

    def _tensor_v3(self, arguments: tuple[object, ...]) -> StoredTensor:
        dtype = arguments[6]
        if not isinstance(dtype, Name) or str(dtype) not in DTYPES:
            raise UserError(f"a tensor of type {shown(dtype)}")
        return self._tensor(arguments[:4], DTYPES[str(dtype)])

    def _open(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror or error}") from None

    def _member(self, name: str) -> tuple[int, int, int]:
        """Returns the position in the file, the size and the CRC-32 of an entry."""
        if name not in self._members:
            raise UserError(
                f"{self.path}: no entry {name}, so it is no file of torch.save (or one from before torch 1.6)"
            )
        return self._members[name]

    def _check(self, name: str, place: int, size: int, checksum: int) -> None:
        if name in self._checked:
            return
        found = 0
        with self._open() as file:
            file.seek(place)
            for begin in range(0, size, _BLOCK):
                found = zlib.crc32(file.read(min(_BLOCK, size - begin)), found)
        if found != checksum:
            raise UserError(f"{self.path}: {name} does not match its checksum")
        self._checked.add(name)

    def _read_directory(self) -> dict[str, tuple[int, int, int]]:
        """Returns position, size and CRC-32 of each entry, by its name without the archive's folder."""
        found: dict[str, tuple[int, int, int]] = {}
        try:
            with self._open() as file, zipfile.ZipFile(_Window(file, self.begin, self.length)) as archive:
                for member in archive.infolist():
                    plain = member.compress_type == zipfile.ZIP_STORED and member.file_size == member.compress_size
                    if not plain or member.flag_bits & 1:
                        raise UserError(f"{self.path}: {member.filename!r} is compressed or encrypted")
                    place = self._place(file, member)
                    if place + member.file_size > self.begin + self.length:
                        raise UserError(f"{self.path}: {member.filename!r} does not fit into the file")
                    name = member.filename.split("/", 1)[-1]
                    if name in found:
                        raise UserError(f"{self.path}: {name!r} is there twice")
                    found[name] = (place, member.file_size, member.CRC)
                    if name == "byteorder" and archive.read(member) != sys.byteorder.encode():
                        raise UserError(f"{self.path}: written on a machine of another byte order")
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError, RuntimeError) as error:
            raise UserError(f"{self.path}: not a file of torch.save ({error})") from None
        return found

    def _place(self, file: BinaryIO, member: zipfile.ZipInfo) -> int:
        """Returns the position of an entry's first byte, behind its local header."""
        at = self.begin + member.header_offset
        file.seek(at)
        header = file.read(30)
        if len(header) != 30 or header[:4] != b"PK\x03\x04" or member.header_offset < 0:
            raise UserError(f"{self.path}: {member.filename!r} has no header")
        return at + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


class _Window(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self.file, self.begin, self.length, self.at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence] + offset
        if self.at < 0:
            raise OSError("a position before the file")
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self.at))
        self.file.seek(self.begin + self.at)
        content = self.file.read(count)
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
