"""The JSON files of a checkpoint: an index for each rank's data file, and the manifest that lists the indexes."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import data_file
from megatron.core.dist_checkpointing.data_file import DTYPE_NAMES, DTYPES
from megatron.core.dist_checkpointing.geometry import FlatRange
from megatron.core.dist_checkpointing.manifest_schema import problem_in_index, problem_in_manifest
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
from megatron.core.utils.files import parse_json, read_regular_file
from megatron.core.utils.json_schema import MOST, shown

FORMAT = "megatron safetensors"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Json = Any
"""A value that json.loads returns."""


class BrokenCheckpoint(UserError):
    """A file of a checkpoint is missing or damaged. `path` is the file, `reason` says what is wrong with it."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = Path(path)
        self.reason = reason


class OutdatedCheckpoint(BrokenCheckpoint):
    """A complete checkpoint from which a run must not continue. A load skips it and takes an older one."""


def index_name(rank: int, mark: str = "") -> str:
    """Returns the file name of a rank's index, with the mark of its save (`Disk.mark`)."""
    return f"rank_{rank:05d}{mark}.json"


def data_name(rank: int, mark: str = "") -> str:
    """Returns the file name of a rank's data file, with the mark of its save (`Disk.mark`)."""
    return f"rank_{rank:05d}{mark}.safetensors"


@dataclass(frozen=True)
class StoredChunk:
    """A chunk in a data file. `name` to `range` are those of `Chunk`."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    range: tuple[int, int]
    dtype: torch.dtype
    key: str
    """Name of the tensor in the safetensors file."""
    offset: int
    """Position of the first byte in the data file."""
    checksums: tuple[int, ...]
    """CRC-32 of each block of `BLOCK_BYTES` bytes."""

    @property
    def part(self) -> FlatRange:
        """The chunk's elements as a flat range of its box."""
        return FlatRange(self.box, *self.range)

    @property
    def nbytes(self) -> int:
        """Number of bytes in the data file."""
        return self.part.numel * self.dtype.itemsize

    def block_part(self, block: int) -> FlatRange:
        """Returns the elements in one of the chunk's blocks."""
        size = data_file.BLOCK_BYTES // self.dtype.itemsize
        return self.part.part(block * size, min((block + 1) * size, self.part.numel))

    def block_position(self, block: int) -> tuple[int, int]:
        """Returns the position of a block's first byte in the data file, and its number of bytes."""
        return self.offset + block * data_file.BLOCK_BYTES, self.block_part(block).numel * self.dtype.itemsize

    def to_json(self) -> Json:
        """Returns the chunk as a JSON object."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "box": dataclasses.asdict(self.box), "dtype": DTYPE_NAMES[self.dtype]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Json]) -> "StoredChunk":
        """Returns the chunk of a JSON object that fits `CHUNK`. Raises ValueError if its numbers contradict each
        other."""
        chunk = cls(
            name=fields["name"],
            global_shape=tuple(fields["global_shape"]),
            box=Box(tuple(fields["box"]["start"]), tuple(fields["box"]["shape"])),
            range=(fields["range"][0], fields["range"][1]),
            dtype=DTYPES[fields["dtype"]],
            key=fields["key"],
            offset=fields["offset"],
            checksums=tuple(fields["checksums"]),
        )
        shape, box, (begin, end) = chunk.global_shape, chunk.box, chunk.range
        if not len(shape) == len(box.start) == len(box.shape) or any(
            start + extent > size for start, extent, size in zip(box.start, box.shape, shape, strict=True)
        ):
            raise ValueError(f"{chunk.name}: its box does not fit into its global_shape")
        if math.prod(max(size, 1) for size in shape) > MOST or not begin <= end <= box.numel:
            raise ValueError(f"{chunk.name}: its range does not fit into its box")
        if len(chunk.checksums) != -(-chunk.nbytes // data_file.BLOCK_BYTES):
            raise ValueError(f"{chunk.name}: {chunk.nbytes} bytes have {len(chunk.checksums)} checksums")
        return chunk


@dataclass(frozen=True)
class RankIndex:
    """The index of one rank: its data file, that file's size in bytes and header checksum, and the chunks in it."""

    data_file: str
    data_size: int
    header_crc32: int
    chunks: tuple[StoredChunk, ...]

    def to_bytes(self) -> bytes:
        """Returns the content of the index file."""
        fields = {
            "format_version": FORMAT_VERSION,
            "data_file": self.data_file,
            "data_size": self.data_size,
            "header_crc32": self.header_crc32,
            "block_bytes": data_file.BLOCK_BYTES,
            "chunks": [chunk.to_json() for chunk in self.chunks],
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> "RankIndex":
        """Parses the content of the index file `path`. Raises BrokenCheckpoint."""
        try:
            fields = parse_json(content, with_nan=True)
            problem = problem_in_index(fields)
            if problem is not None:
                raise ValueError(problem)
            if fields.get("block_bytes") != data_file.BLOCK_BYTES:
                raise ValueError(f"blocks of {fields.get('block_bytes')!r:.40} bytes, not {data_file.BLOCK_BYTES}")
            chunks, size = tuple(map(StoredChunk.from_json, fields["chunks"])), fields["data_size"]
            beyond = next((chunk for chunk in chunks if chunk.offset + chunk.nbytes > size), None)
            if beyond is not None:
                raise ValueError(f"{beyond.name} ends at byte {beyond.offset + beyond.nbytes}, data_size is {size}")
            return cls(_name_of_file(fields["data_file"]), size, fields["header_crc32"], chunks)
        except ValueError as error:
            raise BrokenCheckpoint(path, f"not an index of format version {FORMAT_VERSION}: {error}") from error


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hex) of an index file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> "FileDigest":
        """Computes the digest of a file's content."""
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The main file of a checkpoint. It is written last, so a folder with a manifest is complete.

    `indexes` has the digest of each rank's index, by file name. `common` is the state that all ranks share (iteration
    counts, scheduler, loss scale), `config` describes the run, and `layout` describes how it was split over ranks. All
    are JSON. `weights_finite` is False if a weight is NaN or infinite, None if that is unknown.
    """

    iteration: int
    indexes: Mapping[str, FileDigest]
    common: Mapping[str, Json]
    config: Mapping[str, Json]
    layout: Mapping[str, Json]
    weights_finite: bool | None = None

    def to_bytes(self) -> bytes:
        """Returns the content of the file: JSON whose `sha256` is the digest of the same bytes with 64 zeros in its
        place."""
        fields = {"format": FORMAT, "format_version": FORMAT_VERSION, "sha256": "0" * 64, **dataclasses.asdict(self)}
        content = json.dumps(fields, indent=1).encode() + b"\n"
        return content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode(), 1)

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> "Manifest":
        """Parses the content of the file `path`. Raises BrokenCheckpoint if it is damaged, UserError if another release
        wrote it in a different format."""
        try:
            fields = parse_json(content, with_nan=True)
            if not isinstance(fields, dict):
                raise ValueError("not a JSON object")
        except ValueError as error:
            raise BrokenCheckpoint(path, f"not JSON ({error})") from error
        _check_digest(content, fields.get("sha256"), path)
        if fields.get("format") != FORMAT or fields.get("format_version") != FORMAT_VERSION:
            found = f"format {shown(fields.get('format'))} version {shown(fields.get('format_version'))}"
            raise UserError(f'{path}: {found}; this release reads "{FORMAT}" version {FORMAT_VERSION}')
        try:
            problem = problem_in_manifest(fields)
            if problem is not None:
                raise ValueError(problem)
            indexes = {
                _name_of_file(name): FileDigest(digest["size"], digest["sha256"])
                for name, digest in fields["indexes"].items()
            }
        except ValueError as error:
            raise BrokenCheckpoint(path, f"not a manifest of format version {FORMAT_VERSION}: {error}") from error
        common, config, layout = fields["common"], fields["config"], fields["layout"]
        return cls(fields["iteration"], indexes, common, config, layout, fields.get("weights_finite"))


def _name_of_file(name: str) -> str:
    """Returns the name. Raises ValueError if it could lead out of the checkpoint's folder, or if no file has it."""
    if Path(name).name != name or name in ("", "..", ".") or "\0" in name or len(name.encode()) > 255:
        raise ValueError(f"{shown(name)} is not the name of a file in this folder")
    return name


def _check_digest(content: bytes, digest: Json, path: Path) -> None:
    if not (isinstance(digest, str) and len(digest) == 64 and digest.isascii()):
        raise BrokenCheckpoint(path, "it contains no sha256 of itself")
    blank = content.replace(digest.encode(), b"0" * 64, 1)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise BrokenCheckpoint(path, "its content does not match its sha256")


def read_bytes(path: Path) -> bytes:
    """Returns a file's content. Raises BrokenCheckpoint if it cannot be read."""
    try:
        return read_regular_file(path)
    except OSError as error:
        raise BrokenCheckpoint(path, error.strerror or str(error)) from error


def read_manifest(folder: Path) -> Manifest:
    """Reads and verifies the manifest of a checkpoint folder. Raises as `Manifest.from_bytes` does. Also raises
    BrokenCheckpoint if the folder is named after another iteration."""
    path = folder / MANIFEST
    manifest = Manifest.from_bytes(read_bytes(path), path)
    named = re.match(r"iter_(\d+)", folder.name)
    if named is not None and int(named[1]) != manifest.iteration:
        raise BrokenCheckpoint(
            path,
            f"this is the checkpoint of iteration {manifest.iteration}, but its folder is {folder.name}; rename the "
            f"folder to iter_{manifest.iteration:07d} (--override-ckpt-iteration changes the iteration of a run)",
        )
    return manifest


def read_index(path: Path, digest: FileDigest) -> RankIndex:
    """Reads a rank's index and compares it with its digest in the manifest. Raises BrokenCheckpoint."""
    content = read_bytes(path)
    found = FileDigest.of(content)
    if found.size != digest.size:
        raise BrokenCheckpoint(path, f"{found.size} bytes, the manifest says {digest.size}")
    if found.sha256 != digest.sha256:
        raise BrokenCheckpoint(path, "its content does not match the sha256 in the manifest")
    return RankIndex.from_bytes(content, path)


def read_indexes(folder: Path, manifest: Manifest) -> Sequence[RankIndex]:
    """Reads and verifies all indexes of a checkpoint, by rank. Raises BrokenCheckpoint."""
    return [read_index(folder / name, digest) for name, digest in manifest.indexes.items()]
