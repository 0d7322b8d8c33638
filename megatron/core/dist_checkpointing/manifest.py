"""What the JSON files of a checkpoint say: an index for each rank's data file, and the manifest that ties them."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import data_file
from megatron.core.dist_checkpointing.data_file import DTYPE_NAMES, DTYPES
from megatron.core.dist_checkpointing.geometry import FlatRange
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

FORMAT = "megatron safetensors"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Json = Any
"""What json.loads can give."""


class BrokenCheckpoint(UserError):
    """A file of a checkpoint is missing or is not what was written. `path` is the file, `reason` what is wrong."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = Path(path)
        self.reason = reason


def index_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def data_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class StoredChunk:
    """A chunk on disk. `offset` is its first byte in the data file; a checksum a block of `BLOCK_BYTES`."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    range: tuple[int, int]
    dtype: torch.dtype
    key: str
    offset: int
    checksums: tuple[int, ...]

    @property
    def part(self) -> FlatRange:
        return FlatRange(self.box, *self.range)

    @property
    def nbytes(self) -> int:
        return self.part.numel * self.dtype.itemsize

    def block_part(self, block: int) -> FlatRange:
        """The elements that lie in one of its blocks."""
        size = data_file.BLOCK_BYTES // self.dtype.itemsize
        return self.part.part(block * size, min((block + 1) * size, self.part.numel))

    def block_position(self, block: int) -> tuple[int, int]:
        """First byte, in the data file, of one of its blocks, and the number of bytes."""
        return self.offset + block * data_file.BLOCK_BYTES, self.block_part(block).numel * self.dtype.itemsize

    def to_json(self) -> Json:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "box": dataclasses.asdict(self.box), "dtype": DTYPE_NAMES[self.dtype]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Json]) -> "StoredChunk":
        box = Box(tuple(fields["box"]["start"]), tuple(fields["box"]["shape"]))
        begin, end = fields["range"]
        return cls(
            name=fields["name"],
            global_shape=tuple(fields["global_shape"]),
            box=box,
            range=(begin, end),
            dtype=DTYPES[fields["dtype"]],
            key=fields["key"],
            offset=fields["offset"],
            checksums=tuple(fields["checksums"]),
        )


@dataclass(frozen=True)
class RankIndex:
    """What one rank wrote: its data file and the chunks in it."""

    data_file: str
    data_size: int
    header_crc32: int
    chunks: tuple[StoredChunk, ...]

    def to_bytes(self) -> bytes:
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
        try:
            fields = json.loads(content)
            if fields["block_bytes"] != data_file.BLOCK_BYTES:
                raise ValueError(f"blocks of {fields['block_bytes']} bytes, not {data_file.BLOCK_BYTES}")
            chunks = tuple(map(StoredChunk.from_json, fields["chunks"]))
            return cls(fields["data_file"], fields["data_size"], fields["header_crc32"], chunks)
        except (KeyError, TypeError, ValueError) as error:
            raise BrokenCheckpoint(path, f"not an index of format version {FORMAT_VERSION} ({error!r})") from error


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hex) of an index file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> "FileDigest":
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The root of a checkpoint; its being there makes the folder a whole checkpoint.

    `indexes` has one entry a writing rank, by file name. `common` is the state that every rank shares (iteration
    counts, scheduler, loss scale), `config` the run that wrote it, `layout` how it was split over ranks: all JSON.
    """

    iteration: int
    indexes: Mapping[str, FileDigest]
    common: Mapping[str, Json]
    config: Mapping[str, Json]
    layout: Mapping[str, Json]

    def to_bytes(self) -> bytes:
        """The file: JSON whose `sha256` is the digest of its own bytes with the 64 digits as zeros."""
        fields = {"format": FORMAT, "format_version": FORMAT_VERSION, "sha256": "0" * 64, **dataclasses.asdict(self)}
        content = json.dumps(fields, indent=1).encode() + b"\n"
        return content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode(), 1)

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> "Manifest":
        """Raises BrokenCheckpoint when the content is damaged, UserError when a newer release wrote it."""
        try:
            fields = json.loads(content)
            if not isinstance(fields, dict):
                raise ValueError("not a JSON object")
        except ValueError as error:
            raise BrokenCheckpoint(path, f"not JSON ({error})") from error
        _check_digest(content, fields.get("sha256"), path)
        if fields.get("format") != FORMAT or fields.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{path}: format {fields.get('format')!r} version {fields.get('format_version')!r}; this release reads "
                f"{FORMAT!r} version {FORMAT_VERSION}"
            )
        try:
            indexes = {name: FileDigest(**digest) for name, digest in fields["indexes"].items()}
            return cls(int(fields["iteration"]), indexes, fields["common"], fields["config"], fields["layout"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BrokenCheckpoint(path, f"not a manifest of format version {FORMAT_VERSION} ({error!r})") from error


def _check_digest(content: bytes, digest: Json, path: Path) -> None:
    if not (isinstance(digest, str) and len(digest) == 64 and digest.isascii()):
        raise BrokenCheckpoint(path, "it has no sha256 of itself")
    blank = content.replace(digest.encode(), b"0" * 64, 1)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise BrokenCheckpoint(path, "its bytes do not give its sha256")


def read_bytes(path: Path) -> bytes:
    """A file's content. Raises BrokenCheckpoint when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BrokenCheckpoint(path, error.strerror or str(error)) from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, its digest checked; raises as `Manifest.from_bytes`."""
    path = folder / MANIFEST
    return Manifest.from_bytes(read_bytes(path), path)


def read_index(path: Path, digest: FileDigest) -> RankIndex:
    """A rank's index, compared with what the manifest says about it. Raises BrokenCheckpoint."""
    content = read_bytes(path)
    found = FileDigest.of(content)
    if found.size != digest.size:
        raise BrokenCheckpoint(path, f"{found.size} bytes, the manifest says {digest.size}")
    if found.sha256 != digest.sha256:
        raise BrokenCheckpoint(path, "its bytes do not give the sha256 in the manifest")
    return RankIndex.from_bytes(content, path)


def read_indexes(folder: Path, manifest: Manifest) -> Sequence[RankIndex]:
    """All indexes of a checkpoint, by rank. Raises BrokenCheckpoint."""
    return [read_index(folder / name, digest) for name, digest in manifest.indexes.items()]
