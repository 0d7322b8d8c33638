"""A weighted mean of the weights of several checkpoints, tensor by tensor (model soups, Wortsman et al. 2022)."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint import Checkpoint
from megatron.core.dist_checkpointing.chunk import Chunk, is_weight
from megatron.core.dist_checkpointing.planning import match
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.dist_checkpointing.writing import SaveResult, save_streamed
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

_FILE_BYTES = 4 << 30


def ema_shares(count: int, decay: float) -> list[float]:
    """Returns the share of each of `count` checkpoints, oldest first, in a <- decay a + (1 - decay) w, which begins
    with the first."""
    newer = [decay**age for age in range(count - 1, -1, -1)]
    return [newer[0], *((1.0 - decay) * share for share in newer[1:])]


def save_average(
    checkpoints: Sequence[Checkpoint], shares: Sequence[float], root: Path, common: Mapping[str, Any]
) -> SaveResult:
    """Writes the sum of share * weight over the checkpoints as the checkpoint `release` under `root`, in the type of
    the weights; main weights are read where there are any. Sums are float64; tensors that are no floats are those of
    the last checkpoint. Optimizer state is left out.

    Raises UserError if the checkpoints do not have the same tensors.
    """
    last = checkpoints[-1]
    wanted = [_whole(checkpoint) for checkpoint in checkpoints]
    for checkpoint, chunks in zip(checkpoints, wanted, strict=True):
        for name in sorted(chunks.keys() | wanted[-1].keys()):
            shapes = [list(each[name].global_shape) if name in each else "none" for each in (chunks, wanted[-1])]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"{checkpoint.folder} and {last.folder} have different models: {name} has shape {shapes[0]} and "
                    f"{shapes[1]}"
                )

    def mean_of(chunk: Chunk) -> Tensor:
        if not chunk.tensor.is_floating_point():
            return _read(last, chunk, chunk.tensor.dtype)
        total = torch.zeros(chunk.tensor.numel(), dtype=torch.float64)
        for checkpoint, share in zip(checkpoints, shares, strict=True):
            wide = torch.promote_types(chunk.tensor.dtype, torch.float32)
            total.add_(_read(checkpoint, chunk, wide), alpha=share)
        return total.to(chunk.tensor.dtype)

    files = _in_files(list(wanted[-1].values()))
    config = last.manifest.config
    return save_streamed(root, files, mean_of, step="release", common=common, config=config)


def _whole(checkpoint: Checkpoint) -> dict[str, Chunk]:
    """Returns a chunk without memory for each whole weight of a checkpoint."""
    found = {}
    for name, stored in checkpoint.catalogue.items():
        if is_weight(name):
            shape = tuple(stored[0].chunk.global_shape)
            tensor = torch.empty(shape, dtype=stored[0].chunk.dtype, device="meta")
            found[name] = Chunk(name, shape, Box.whole(shape), None, tensor)
    return found


def _read(checkpoint: Checkpoint, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    read = dataclasses.replace(chunk, tensor=torch.empty(chunk.tensor.numel(), dtype=dtype))
    fill_tensors(checkpoint, match([read], checkpoint.catalogue))
    return read.tensor


def _in_files(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    file: list[Chunk] = []
    for chunk in chunks:
        if file and sum(each.tensor.nbytes for each in file) + chunk.tensor.nbytes > _FILE_BYTES:
            yield file
            file = []
        file.append(chunk)
    if file:
        yield file
