"""Opens and verifies a checkpoint folder."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron.core.dist_checkpointing.chunk import AVERAGE, optimizer_state_name
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
from megatron.core.exceptions import UserError


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: folder, manifest, indexes by rank, and all stored chunks by name."""

    folder: Path
    manifest: Manifest
    indexes: Sequence[RankIndex]
    catalogue: Catalogue

    @property
    def nbytes(self) -> int:
        """Bytes of all data files together."""
        return sum(index.data_size for index in self.indexes)

    def averages(self) -> dict[str, str]:
        """Returns the name of the moving average (--ema-decay) of each weight that has one. Raises UserError if none
        has."""
        prefix = optimizer_state_name(AVERAGE, "")
        found = {name.removeprefix(prefix): name for name in self.catalogue if name.startswith(prefix)}
        if not found:
            raise UserError(f"{self.folder} has no moving average of the weights: its run had no --ema-decay")
        return found


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads the manifest and the indexes and verifies their digests. Raises BrokenCheckpoint, naming the file."""
    manifest = read_manifest(folder)
    indexes = read_indexes(folder, manifest)
    return Checkpoint(folder, manifest, indexes, make_catalogue(indexes))


def check_files(checkpoint: Checkpoint) -> None:
    """Verifies everything except the tensors' bytes: size and header of each data file, and that every element of every
    tensor is stored once.

    Reads only the headers. Raises BrokenCheckpoint, naming the first broken file.
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
            raise BrokenCheckpoint(path, "its header does not match the checksum in its index")
    check_complete(checkpoint.catalogue)


def verify(folder: Path, tensors: bool = True) -> tuple[Checkpoint | None, list[BrokenCheckpoint]]:
    """Returns the opened checkpoint (None if it cannot be opened) and everything that is wrong with it.

    The second value is the first broken file or, if all files are right, all broken tensors. Without `tensors`, the
    tensors' bytes are not read.
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
    """Verifies the checksums of all tensors and yields an error for each broken tensor. Reads every byte once."""
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
    """Reads and verifies one block of a stored chunk. Returns its elements, one-dimensional, which are valid until the
    reader's next read. Raises BrokenCheckpoint."""
    begin, count = chunk.block_position(block)
    try:
        content = reader.read(path, begin, count)
    except (OSError, EOFError) as error:
        raise BrokenCheckpoint(path, f"{chunk.name} cannot be read at byte {begin}: {error}") from error
    if zlib.crc32(content.numpy().data) != chunk.checksums[block]:
        raise BrokenCheckpoint(path, f"the bytes of {chunk.name} from byte {begin} on do not match their checksum")
    return content.view(chunk.dtype)
