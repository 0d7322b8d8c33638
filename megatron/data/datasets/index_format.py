"""The format of .idx files: position and length of each sequence in a .bin file, and the sequences of each document.

All numbers are little-endian, one field after the other without padding:

    9 bytes  magic "MMIDIDX\\0\\0"
    u64      version = 1
    u8       dtype code of the tokens in .bin
    u64      S, number of sequences
    u64      D, length of the document indices (number of documents + 1)
    i32[S]   sequence lengths, in tokens
    i64[S]   byte offset of every sequence in .bin
    i64[D]   document indices: first 0, then the number of sequences up to and including each document
    i8[S]    mode of every sequence; only in multimodal files, without a mark in the header
"""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import DTypeLike

from megatron.core.exceptions import UserError
from megatron.core.utils.files import open_atomically, open_regular_file
from megatron.data.datasets.object_store import is_url, read_bytes, size_of

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_ENTRIES_AT_ONCE = 1 << 20  # so that an index larger than memory can be written

Shards = np.ndarray | Sequence[np.ndarray]
"""An array, or consecutive shards of it, which may be memory maps."""


class DType(Enum):
    """Codes of the token types of .bin files."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, dtype: DTypeLike) -> int:
        """Returns the code of a numpy type. Raises KeyError if it has none."""
        return cls[np.dtype(dtype).name].value

    @classmethod
    def dtype_from_code(cls, code: int) -> type[np.number]:
        """Returns the numpy type of a code. Raises ValueError if there is none."""
        return getattr(np, cls(code).name)

    @staticmethod
    def size(key: "int | DTypeLike") -> int:
        """Returns the bytes of one token, for a code or a numpy type."""
        return np.dtype(DType.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.number]:
        """Returns the token type for a vocabulary of this size: uint16 below 65500, otherwise (or if unknown) int32."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32


@dataclass(frozen=True)
class IndexHeader:
    """The header of an .idx file (34 bytes), and the positions in bytes of the arrays that follow it."""

    dtype: type[np.number]
    num_sequences: int
    num_document_indices: int

    @property
    def lengths_offset(self) -> int:
        """Position of the sequence lengths."""
        return _HEADER.size

    @property
    def pointers_offset(self) -> int:
        """Position of the byte offsets of sequences."""
        return self.lengths_offset + 4 * self.num_sequences

    @property
    def document_indices_offset(self) -> int:
        """Position of the document indices."""
        return self.pointers_offset + 8 * self.num_sequences

    @property
    def modes_offset(self) -> int:
        """Position of the modes; the end of the file if it has none."""
        return self.document_indices_offset + 8 * self.num_document_indices


def get_bin_path(path_prefix: str) -> str:
    """Returns the path of a prefix's token file."""
    return path_prefix + ".bin"


def get_idx_path(path_prefix: str) -> str:
    """Returns the path of a prefix's index file."""
    return path_prefix + ".idx"


def read_header(path: str | os.PathLike[str]) -> IndexHeader:
    """Reads and checks the header of an .idx file.

    Raises UserError if the file cannot be read, is not an index, has an unknown version or token type, or is shorter
    than its header says.
    """
    if is_url(path):
        path = os.fspath(path)
        size = size_of(path)
        head = read_bytes(path, 0, min(size, _HEADER.size))
    else:
        try:
            with open_regular_file(path) as file:
                head = file.read(_HEADER.size)
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            raise UserError(f"{path}: no such index file; tools/preprocess_data.py writes it beside the .bin") from None
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise UserError(f"{path}: not an index of tokens (it does not begin with {MAGIC!r})")
    _, version, code, num_sequences, num_document_indices = _HEADER.unpack(head)
    if version != VERSION:
        raise UserError(f"{path}: index version {version}; only version {VERSION} is known")
    try:
        dtype = DType.dtype_from_code(code)
    except ValueError:
        raise UserError(f"{path}: unknown token type code {code}; known: {[d.value for d in DType]}") from None
    header = IndexHeader(dtype, num_sequences, num_document_indices)
    if size < header.modes_offset:
        raise UserError(f"{path}: too short: {size} bytes, its header says {header.modes_offset}; copy it again")
    return header


def check_bin_size(path_prefix: str) -> None:
    """Compares the size of a local .bin file with the end of the last sequence in its .idx, of which it reads a few
    bytes. Raises UserError, also for the reasons of `read_header`."""
    idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
    header, end = read_header(idx_path), 0
    if header.num_sequences:
        last = header.num_sequences - 1
        (length,) = np.fromfile(idx_path, "<i4", 1, offset=header.lengths_offset + 4 * last)
        (start,) = np.fromfile(idx_path, "<i8", 1, offset=header.pointers_offset + 8 * last)
        end = int(start) + int(length) * DType.size(header.dtype)
    size = os.path.getsize(bin_path)
    if size != end:
        raise UserError(f"{bin_path}: {size} bytes, {idx_path} says {end}; copy both again")


def write_index(
    path: str | os.PathLike[str],
    dtype: DTypeLike,
    lengths: Shards,
    document_indices: Shards,
    modes: Shards | None = None,
) -> None:
    """Writes an .idx file in one step: into a temporary file that is synced and renamed.

    `lengths` are the tokens of each sequence. `document_indices` begins with 0 and ends with the number of sequences.
    Each array may be given in shards. Needs a few megabytes of memory.
    """
    num_sequences = _count(lengths)
    num_document_indices = _count(document_indices)
    header = _HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(dtype), num_sequences, num_document_indices)
    with open_atomically(path) as file:
        file.write(header)
        for chunk in _chunks(lengths, "<i4"):
            file.write(chunk.data)
        end = 0
        for chunk in _chunks(lengths, "<i8"):
            ends = end + np.cumsum(chunk * np.dtype(dtype).itemsize, dtype="<i8")
            starts = np.concatenate([np.array([end], dtype="<i8"), ends[:-1]])
            file.write(starts.data)
            end = int(ends[-1])
        last = 0
        for chunk in _chunks(document_indices, "<i8"):
            file.write(chunk.data)
            last = int(chunk[-1])
        assert last == num_sequences, f"documents end at sequence {last}, but there are {num_sequences}"
        if modes is not None:
            assert _count(modes) == num_sequences, "one mode per sequence"
            for chunk in _chunks(modes, "i1"):
                file.write(chunk.data)


def _count(shards: Shards) -> int:
    return shards.size if isinstance(shards, np.ndarray) else sum(shard.size for shard in shards)


def _chunks(shards: Shards, dtype: str) -> Iterator[np.ndarray]:
    for array in [shards] if isinstance(shards, np.ndarray) else shards:
        for start in range(0, array.size, _ENTRIES_AT_ONCE):
            yield np.ascontiguousarray(array[start : start + _ENTRIES_AT_ONCE], dtype=dtype)
