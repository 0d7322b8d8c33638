"""A checkpoint folder that was opened for reading, and how much of it was verified."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron.core.dist_checkpointing.data_file import BlockReader, read_header_crc32
from megatron.core.dist_checkpointing.manifest import (
    BrokenCheckpoint,
    Manifest,
    RankIndex,
    StoredChunk,
    read_indexes,
    read_manifest,
)
from megatron.core.dist_checkpointing.planning import Catalogue, check_complete, make_catalogue


@dataclass(frozen=True)
class Checkpoint:
    """A folder, its manifest, its indexes by rank, and all stored chunks by name."""

    folder: Path
    manifest: Manifest
    indexes: Sequence[RankIndex]
    catalogue: Catalogue

    @property
    def nbytes(self) -> int:
        """Size of all data files."""
        return sum(index.data_size for index in self.indexes)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the manifest and the indexes and verify their digests. Raises BrokenCheckpoint naming the file."""
    manifest = read_manifest(folder)
    indexes = read_indexes(folder, manifest)
    return Checkpoint(folder, manifest, indexes, make_catalogue(indexes))


def check_files(checkpoint: Checkpoint) -> None:
    """Verify all but the tensors' bytes: size and header of each data file, and that every tensor is stored once.

    Costs a read of the headers. Raises BrokenCheckpoint naming the first bad file.
    """
    for index in checkpoint.indexes:
        path = checkpoint.folder / index.data_file
        try:
            size = path.stat().st_size
            header = read_header_crc32(path)
        except OSError as error:
            raise BrokenCheckpoint(path, error.strerror or str(error)) from error
        if size != index.data_size:
            raise BrokenCheckpoint(path, f"{size} bytes, its index says {index.data_size}")
        if header != index.header_crc32:
            raise BrokenCheckpoint(path, "its header does not give the checksum in its index")
    check_complete(checkpoint.catalogue)


def verify(folder: Path, tensors: bool = True) -> tuple[Checkpoint | None, list[BrokenCheckpoint]]:
    """Everything that is wrong with a checkpoint folder: all broken tensors, or the first broken file before those.

    Also gives the opened checkpoint, None where it cannot be opened. Without `tensors` their bytes are not read.
    """
    try:
        checkpoint = open_checkpoint(folder)
    except BrokenCheckpoint as error:
        return None, [error]
    try:
        check_files(checkpoint)
    except BrokenCheckpoint as error:
        return checkpoint, [error]
    return checkpoint, list(broken_tensors(checkpoint)) if tensors else []


def broken_tensors(checkpoint: Checkpoint) -> Iterator[BrokenCheckpoint]:
    """Verify the checksum of every tensor; what is wrong, a finding a tensor. Reads every byte once."""
    with BlockReader(pinned=False) as reader:
        for index in checkpoint.indexes:
            path = checkpoint.folder / index.data_file
            for chunk in sorted(index.chunks, key=lambda chunk: chunk.offset):
                try:
                    for block in range(len(chunk.checksums)):
                        read_block(reader, path, chunk, block)
                except BrokenCheckpoint as finding:
                    yield finding


def read_block(reader: BlockReader, path: Path, chunk: StoredChunk, block: int) -> Tensor:
    """The elements of one block of a stored chunk, verified; valid until the reader's next. Raises BrokenCheckpoint."""
    begin, count = chunk.block_position(block)
    try:
        content = reader.read(path, begin, count)
    except (OSError, EOFError) as error:
        raise BrokenCheckpoint(path, f"{chunk.name} cannot be read at byte {begin}: {error}") from error
    if zlib.crc32(content.numpy().data) != chunk.checksums[block]:
        raise BrokenCheckpoint(path, f"the bytes of {chunk.name} from byte {begin} on do not give their checksum")
    return content.view(chunk.dtype)
