"""Writes the files of one rank: a data file with its chunks, and an index that describes them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.data_file import LazyTensor, TensorEntry, aligned_order, write_data_file
from megatron.core.dist_checkpointing.disk import Disk, cannot_write
from megatron.core.dist_checkpointing.manifest import RankIndex, StoredChunk, data_name, index_name


def write_rank(
    disk: Disk,
    temporary: Path,
    rank: int,
    chunks: Sequence[Chunk],
    values_of: Callable[[Chunk], Tensor] | None = None,
    index_appears_whole: bool = False,
    over: bool = False,
) -> None:
    """Writes and syncs a rank's data file and index into the folder `temporary`.

    The elements are those of the chunks' tensors, or come from `values_of` (one-dimensional), chunk by chunk. Raises
    UserError if a file cannot be written. With `index_appears_whole` the index gets its name once it is synced, so that
    other ranks may wait for the file. With `over` a data file that is there is written over.
    """
    for device in {chunk.tensor.device for chunk in chunks if chunk.tensor.is_cuda}:
        torch.cuda.synchronize(device)  # any stream may still be writing the tensors
    entries = {_key(chunk): chunk for chunk in chunks}
    assert len(entries) == len(chunks), "a chunk is listed twice"
    ordered = aligned_order(
        [TensorEntry(key, _shape(chunk), _elements(chunk, values_of)) for key, chunk in entries.items()]
    )
    name = data_name(rank, disk.mark)
    try:
        written = write_data_file(disk, temporary / name, ordered, over)
        stored = [
            _stored(entries[entry.key], entry.key, offset, checksums)
            for entry, offset, checksums in zip(ordered, written.offsets, written.checksums, strict=True)
        ]
        index = RankIndex(name, written.size, written.header_crc32, tuple(stored))
        write_index = disk.replace_file if index_appears_whole else disk.write_file
        write_index(temporary / index_name(rank, disk.mark), index.to_bytes())
    except OSError as error:
        raise cannot_write(temporary / name, error) from error


def _elements(chunk: Chunk, values_of: Callable[[Chunk], Tensor] | None) -> Tensor | LazyTensor:
    if values_of is None and chunk.encoded is None:
        return chunk.flat
    make = chunk.values if values_of is None else partial(values_of, chunk)
    return LazyTensor(chunk.tensor.dtype, chunk.tensor.numel(), make)


def _key(chunk: Chunk) -> str:
    """Returns the name of a chunk in its data file: the canonical name if it is the whole tensor, otherwise with its
    position."""
    if chunk.box.shape == chunk.global_shape and chunk.range == (0, chunk.box.numel):
        return chunk.name
    spans = ",".join(f"{a}:{a + n}" for a, n in zip(chunk.box.start, chunk.box.shape, strict=True))
    return f"{chunk.name}[{spans}]" if _is_box(chunk) else "{}[{}]({}:{})".format(chunk.name, spans, *chunk.range)


def _shape(chunk: Chunk) -> tuple[int, ...]:
    return chunk.box.shape if _is_box(chunk) else (chunk.tensor.numel(),)


def _is_box(chunk: Chunk) -> bool:
    return chunk.range == (0, chunk.box.numel)


def _stored(chunk: Chunk, key: str, offset: int, checksums: Sequence[int]) -> StoredChunk:
    shape, dtype = tuple(chunk.global_shape), chunk.tensor.dtype
    return StoredChunk(chunk.name, shape, chunk.box, chunk.range, dtype, key, offset, tuple(checksums))
