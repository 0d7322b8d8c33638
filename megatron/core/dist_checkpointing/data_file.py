"""Writes and reads the data file of one rank: a safetensors file, in blocks with one checksum each.

The file is plain safetensors (8 bytes little-endian header length, JSON header, data), so any safetensors reader opens
it. Writing streams the tensors. It needs additional memory for two blocks if tensors are on a device, and for one
tensor at a time if tensors are made during the write (`LazyTensor`). Reading copies into one block instead of mapping
the file, so an I/O error is an exception, not a SIGBUS.

The checksum is a CRC-32 of each block of 16 MiB. It detects accidents, not forgery. It runs at 4 GB/s on one core;
SHA-256 would run at 1.7 GB/s. A reader of a small part reads whole blocks to verify them.
"""

import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.utils.files import open_regular_file

BLOCK_BYTES = 16 << 20
"""Bytes of a block."""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The types that a checkpoint can contain, and their names in safetensors files."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Types by their names in safetensors files."""

MAX_HEADER_BYTES = 100_000_000
"""Longest header that safetensors readers accept."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose elements `make` returns (one-dimensional) when they are written. They are freed afterwards."""

    dtype: torch.dtype
    numel: int
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write: its key and shape in the file, and its elements (contiguous, one-dimensional)."""

    key: str
    shape: tuple[int, ...]
    flat: Tensor | LazyTensor

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.flat.dtype.itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.flat.numel if isinstance(self.flat, LazyTensor) else self.flat.numel()

    def elements(self) -> Tensor:
        """Returns the elements; makes those of a LazyTensor."""
        if isinstance(self.flat, Tensor):
            return self.flat
        made = self.flat.make()
        assert (made.dtype, made.shape) == (self.flat.dtype, (self.flat.numel,)), self.key
        return made


@dataclass(frozen=True)
class WrittenFile:
    """A written data file: size in bytes, CRC-32 of the header and, for each entry, the position of its first byte in
    the file and the CRC-32 of each block."""

    size: int
    header_crc32: int
    offsets: list[int]
    checksums: list[list[int]]


def aligned_order(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Sorts entries by width of type, widest first, so that each tensor is aligned for its type. Equal widths keep
    their order."""
    return sorted(entries, key=lambda entry: -entry.flat.dtype.itemsize)


def write_data_file(disk: Disk, path: Path, entries: Sequence[TensorEntry], over: bool = False) -> WrittenFile:
    """Writes and syncs a safetensors file of these entries, in this order (see `aligned_order`); with `over` an
    existing file is written over (`Disk.create_over`). Raises OSError."""
    assert sys.byteorder == "little"
    header, offsets = _header(entries)
    end = offsets[-1] + entries[-1].nbytes if entries else len(header)
    checksums: list[list[int]] = [[] for _ in entries]
    opened = disk.create_over(path, end) if over else disk.create(path)
    with opened as file, ThreadPoolExecutor(1) as pool:
        disk.write(file, header)
        for index, block in _blocks(entries):
            checksum = pool.submit(zlib.crc32, block)
            disk.write(file, block)
            checksums[index].append(checksum.result())
        disk.sync(file)
    return WrittenFile(end, zlib.crc32(header), offsets, checksums)


def _header(entries: Sequence[TensorEntry]) -> tuple[bytes, list[int]]:
    """Returns the header's bytes, and the position of each entry's first byte in the file."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin, begins = 0, []
    for entry in entries:
        assert entry.key not in fields, f"{entry.key} is written twice"
        end = begin + entry.nbytes
        dtype = DTYPE_NAMES[entry.flat.dtype]
        fields[entry.key] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
        begins.append(begin)
        begin = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= MAX_HEADER_BYTES, f"{len(entries)} tensors are too many for one safetensors file"
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + begin for begin in begins]


def _blocks(entries: Sequence[TensorEntry]) -> Iterator[tuple[int, memoryview]]:
    """Yields all entries' bytes in blocks, each with the entry's index. A block is valid until the next one is
    requested.

    A block on a device is copied while the block before it is written.
    """
    blocks = (
        (index, block)
        for index, entry in enumerate(entries)
        for block in entry.elements().view(torch.uint8).split(BLOCK_BYTES)
    )
    staging = _Staging()
    waiting: tuple[int, Tensor] | None = None
    for index, block in blocks:
        following = (index, staging.fetch(block))
        if waiting is not None:
            yield waiting[0], staging.ready(waiting[1])
        waiting = following
    if waiting is not None:
        yield waiting[0], staging.ready(waiting[1])


class _Staging:
    """Copies blocks from a device into two pinned buffers in turn. Blocks in host memory are returned as they are."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._turn = 0
        self._arrived: dict[int, torch.cuda.Event] = {}

    def fetch(self, block: Tensor) -> Tensor:
        """Starts the copy of a block (bytes) to host memory."""
        if block.device.type == "cpu":
            return block
        if len(self._buffers) < 2:
            self._buffers.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True))
        host = self._buffers[self._turn % len(self._buffers)][: block.numel()]
        self._turn += 1
        host.copy_(block, non_blocking=True)
        self._arrived[host.data_ptr()] = torch.cuda.Event()
        self._arrived[host.data_ptr()].record(torch.cuda.current_stream(block.device))
        return host

    def ready(self, host: Tensor) -> memoryview:
        """Waits for the copy of a fetched block."""
        arrived = self._arrived.pop(host.data_ptr(), None)
        if arrived is not None:
            arrived.synchronize()
        return host.numpy().data


def read_header_crc32(path: Path) -> int:
    """Returns the CRC-32 of a data file's header and its length field; -1 if the length is impossible. Raises
    OSError."""
    with open_regular_file(path) as file:
        length = file.read(8)
        count = int.from_bytes(length, "little")
        return zlib.crc32(file.read(count), zlib.crc32(length)) if count <= MAX_HEADER_BYTES else -1


class BlockReader:
    """Reads byte ranges of data files into one host buffer, which it reuses. Keeps the last file open."""

    def __init__(self, pinned: bool) -> None:
        self._buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._bytes = self._buffer.numpy().data
        self._path: Path | None = None
        self._file: io.RawIOBase | None = None

    def read(self, path: Path, offset: int, count: int) -> Tensor:
        """Returns `count` bytes of a file from byte `offset` on, as uint8, valid until the next call. Raises OSError,
        or EOFError if the file is too short."""
        if self._file is None or path != self._path:
            self.close()
            self._file, self._path = open_regular_file(path), path
        self._file.seek(offset)
        done = 0
        while done < count:
            got = self._file.readinto(self._bytes[done:count])
            if not got:
                raise EOFError(f"{count - done} bytes are missing at byte {offset + done}")
            done += got
        return self._buffer[:count]

    def close(self) -> None:
        """Closes the open file, if any."""
        if self._file is not None:
            self._file.close()
        self._file = self._path = None

    def __enter__(self) -> "BlockReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
