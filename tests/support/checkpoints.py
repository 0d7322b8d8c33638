"""Checkpoints of small tensors in any layout; one process saves for all ranks."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import folders, writing
from megatron.core.dist_checkpointing.checkpoint import open_checkpoint
from megatron.core.dist_checkpointing.chunk import Chunk, optimizer_state_name
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.planning import assign_writes, match
from megatron.core.dist_checkpointing.rank_file import write_rank
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.parameters import Box

SHAPES = {"embedding.weight": (41, 24), "layers.0.weight": (2, 12, 24), "layers.0.bias": (24,), "step": ()}


def whole_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a tensor whose elements all differ and depend on the name."""
    seed = sum(map(ord, name))
    return (torch.arange(math.prod(shape), dtype=torch.float64) + 1000.0 * seed).view(shape).to(dtype)


def slice_of(whole: torch.Tensor, box: Box, flat_range: tuple[int, int] | None) -> torch.Tensor:
    inside = whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))].reshape(-1)
    return (inside if flat_range is None else inside[slice(*flat_range)]).clone()


def filled(chunk: Chunk) -> torch.Tensor:
    """Returns the values that the chunk's tensor should have."""
    whole = whole_tensor(chunk.name, chunk.global_shape, chunk.tensor.dtype)
    return slice_of(whole, chunk.box, chunk.flat_range)


def make_chunk(
    name: str,
    shape: tuple[int, ...],
    box: Box | None = None,
    flat_range: tuple[int, int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    holders: tuple[int, ...] = (),
    empty: bool = False,
) -> Chunk:
    """Returns a chunk with its part of `whole_tensor(name)`, or with zeros if `empty`."""
    box = box or Box.whole(shape)
    values = slice_of(whole_tensor(name, shape, dtype), box, flat_range)
    return Chunk(name, shape, box, flat_range, torch.zeros_like(values) if empty else values, holders)


def chunks_of_rank(empty: bool = False) -> list[Chunk]:
    """Weights replicated over all ranks (in bfloat16) and, for each, one moment sharded by flat range (in float32)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = []
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        span = (numel * rank // size, numel * (rank + 1) // size)
        holders = tuple(range(size))
        chunks.append(make_chunk(name, shape, dtype=torch.bfloat16, holders=holders, empty=empty))
        chunks.append(make_chunk(optimizer_state_name("exp_avg", name), shape, None, span, empty=empty))
    return chunks


def save_as(root: Path, chunks_by_rank: Sequence[Sequence[Chunk]], step: int = 10, disk: Disk | None = None) -> Path:
    """Saves a checkpoint from the chunks of each rank, in this process, and returns its folder."""
    disk = disk or Disk()
    temporary = root / writing._create_temporary(disk, root / folders.folder_name(step))["temporary"]
    for rank, chunks in enumerate(chunks_by_rank):
        write_rank(disk, temporary, rank, assign_writes(chunks, rank))
    contents = writing.Contents(len(chunks_by_rank), {"train_state": {"iteration": step}}, {}, {})
    writing._publish(disk, temporary, step, contents, None)
    return root / f"iter_{step:07d}"


def load_as(folder: Path, chunks: Sequence[Chunk]) -> None:
    """Loads the values of one rank's chunks into their tensors."""
    checkpoint = open_checkpoint(folder)
    matching = match(chunks, checkpoint.catalogue)
    assert not matching.missing, matching.missing
    fill_tensors(checkpoint, matching)
