"""The zig-zag split of rows over context parallel ranks (see `megatron.core.tokens.SequencePart`)."""

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.tokens import SequencePart


def sequence_part(groups: ProcessGroupCollection) -> SequencePart | None:
    """Returns the part of every row that this rank holds; None without context parallelism. Does not communicate."""
    size = groups.size("cp")
    return None if size == 1 else SequencePart(groups.rank("cp"), size)


def cut_rows(tensor: Tensor, part: SequencePart, dim: int) -> Tensor:
    """Returns a rank's part of a tensor whose dimension `dim` holds whole rows: a copy of the rank's two chunks.

    Raises UserError if the rows do not divide into 2 * ranks chunks.
    """
    length = tensor.shape[dim]
    chunk = chunk_length(length, part.size)
    return torch.cat([tensor.narrow(dim, number * chunk, chunk) for number in part.chunks()], dim)


def chunk_length(row_length: int, ranks: int) -> int:
    """Returns the number of tokens of each of a row's 2 * `ranks` chunks. Raises UserError if they are not equal."""
    chunks = 2 * ranks
    if row_length % chunks:
        below = row_length - row_length % chunks
        works = " or ".join(str(length) for length in (below, below + chunks) if length)
        raise UserError(
            f"rows of {row_length} tokens (seq_length) do not divide into the 2 x {ranks} chunks of "
            f"context_parallel_size {ranks}; use {works}"
        )
    return row_length // chunks


def in_natural_order(gathered: Tensor, ranks: int) -> Tensor:
    """Reorders the parts of all ranks, which lie in rank order [row_length, ...], into the order of the row: a copy."""
    pieces = gathered.unflatten(0, (ranks, 2, -1))  # [ranks, 2, chunk, ...]
    return torch.cat([pieces[:, 0].flatten(0, 1), pieces[:, 1].flip(0).flatten(0, 1)])


def in_rank_order(row: Tensor, ranks: int) -> Tensor:
    """Reorders a row [row_length, ...] into the parts of all ranks, in rank order: the inverse of
    `in_natural_order`."""
    first, second = row.unflatten(0, (2, ranks, -1))  # [ranks, chunk, ...] each
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)
