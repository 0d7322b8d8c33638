"""The .idx file: where every sequence of a .bin file starts, how long it is, and which sequences form a document.

All numbers are little-endian, one field after the other without padding:

    9 bytes  magic "MMIDIDX\\0\\0"
    u64      version = 1
    u8       dtype code of the tokens in .bin
    u64      S, number of sequences
    u64      D, length of the document indices (number of documents + 1)
    i32[S]   sequence lengths, in tokens
    i64[S]   byte offset of every sequence in .bin
    i64[D]   document indices: first 0, then the number of sequences up to and including each document
    i8[S]    mode of every sequence; only in multimodal files, and nothing in the file says so
"""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from megatron.core.exceptions import UserError
from megatron.core.utils.files import open_atomically

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_PIECE = 1 << 20  # entries handled at a time, so that an index larger than memory can be written

# One array, or its pieces in order (memory maps are welcome).
Pieces = np.ndarray | Sequence[np.ndarray]


class DType(Enum):
    """Codes of the token types a .bin file may hold."""

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
        """The code that stands for a numpy type; KeyError if there is none."""
        return cls[np.dtype(dtype).name].value

    @classmethod
    def dtype_from_code(cls, code: int) -> type[np.number]:
        """The numpy type a code stands for; ValueError if there is none."""
        return getattr(np, cls(code).name)

    @staticmethod
    def size(key: "int | DTypeLike") -> int:
        """Bytes of one token, given a code or a numpy type."""
        return np.dtype(DType.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.number]:
        """The type a writer uses for a vocabulary of this size: uint16 below 65500, else (or if unknown) int32."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32


@dataclass(frozen=True)
class IndexHeader:
    """What the first 34 bytes of an .idx file say, and where its arrays therefore lie."""

    dtype: type[np.number]
    num_sequences: int
    num_document_indices: int

    @property
    def lengths_offset(self) -> int:
        return _HEADER.size

    @property
    def pointers_offset(self) -> int:
        return self.lengths_offset + 4 * self.num_sequences

    @property
    def document_indices_offset(self) -> int:
        return self.pointers_offset + 8 * self.num_sequences

    @property
    def modes_offset(self) -> int:
        return self.document_indices_offset + 8 * self.num_document_indices


def get_bin_path(path_prefix: str) -> str:
    """The token file of a prefix."""
    return path_prefix + ".bin"


def get_idx_path(path_prefix: str) -> str:
    """The index file of a prefix."""
    return path_prefix + ".idx"


def read_header(path: str | os.PathLike[str]) -> IndexHeader:
    """Read and check the header of an .idx file.

    Raises UserError when the file is absent, is no index, is of an unknown version or token type, or is shorter than
    the arrays it announces.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER.size)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise UserError(f"{path}: no such index file; tools/preprocess_data.py writes it beside the .bin") from None
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise UserError(f"{path}: not an index of tokens (it does not start with {MAGIC!r})")
    _, version, code, num_sequences, num_document_indices = _HEADER.unpack(head)
    if version != VERSION:
        raise UserError(f"{path}: index version {version}; only version {VERSION} is known")
    try:
        dtype = DType.dtype_from_code(code)
    except ValueError:
        raise UserError(f"{path}: unknown token type code {code}; known: {[d.value for d in DType]}") from None
    header = IndexHeader(dtype, num_sequences, num_document_indices)
    if size < header.modes_offset:
        raise UserError(f"{path}: cut short: {size} bytes where its header announces {header.modes_offset}")
    return header


def write_index(
    path: str | os.PathLike[str],
    dtype: DTypeLike,
    lengths: Pieces,
    document_indices: Pieces,
    modes: Pieces | None = None,
) -> None:
    """Write an .idx file in one step (aside, synced, renamed).

    `lengths` are tokens a sequence; `document_indices` starts with 0 and ends with the number of sequences. Each is one
    array or a sequence of arrays that follow each other; memory stays at a few megabytes beyond what the caller holds.
    """
    num_sequences = _count(lengths)
    num_document_indices = _count(document_indices)
    header = _HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(dtype), num_sequences, num_document_indices)
    with open_atomically(path) as file:
        file.write(header)
        for piece in _in_pieces(lengths, "<i4"):
            file.write(piece.data)
        end = 0
        for piece in _in_pieces(lengths, "<i8"):
            ends = end + np.cumsum(piece * np.dtype(dtype).itemsize, dtype="<i8")
            starts = np.concatenate([np.array([end], dtype="<i8"), ends[:-1]])
            file.write(starts.data)
            end = int(ends[-1])
        last = 0
        for piece in _in_pieces(document_indices, "<i8"):
            file.write(piece.data)
            last = int(piece[-1])
        assert last == num_sequences, f"documents end at sequence {last}, but there are {num_sequences}"
        if modes is not None:
            assert _count(modes) == num_sequences, "one mode a sequence"
            for piece in _in_pieces(modes, "i1"):
                file.write(piece.data)


def _count(pieces: Pieces) -> int:
    return pieces.size if isinstance(pieces, np.ndarray) else sum(piece.size for piece in pieces)


def _in_pieces(pieces: Pieces, dtype: str) -> Iterator[np.ndarray]:
    for array in [pieces] if isinstance(pieces, np.ndarray) else pieces:
        for start in range(0, array.size, _PIECE):
            yield np.ascontiguousarray(array[start : start + _PIECE], dtype=dtype)
