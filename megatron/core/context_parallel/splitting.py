"""How a row of tokens is split over context parallel ranks: in zig-zag, as `megatron.core.tokens.SequencePart` says."""

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokens import SequencePart


def sequence_part(groups: ProcessGroupCollection) -> SequencePart | None:
    """What this rank holds of every row; None where there is no context parallelism. Does not communicate."""
    size = groups.size("cp")
    return None if size == 1 else SequencePart(groups.rank("cp"), size)


def cut_rows(tensor: Tensor, part: SequencePart, dim: int) -> Tensor:
    """A rank's part of a dimension over which whole rows extend: a copy of its two chunks, one after the other.

    Raises UserError where the rows do not divide into 2 * ranks chunks.
    """
    length = tensor.shape[dim]
    chunk = chunk_length(length, part.size)
    return torch.cat([tensor.narrow(dim, number * chunk, chunk) for number in part.chunks()], dim)


def chunk_length(row_length: int, ranks: int) -> int:
    """Tokens of each of the 2 * `ranks` chunks of a row. Raises UserError where they would not be equal."""
    chunks = 2 * ranks
    if row_length % chunks:
        below = row_length - row_length % chunks
        works = " or ".join(str(length) for length in (below, below + chunks) if length)
        raise UserError(
            f"rows of {row_length} tokens (seq_length) do not divide into the 2 x {ranks} chunks of "
            f"context_parallel_size {ranks}; {works} would"
        )
    return row_length // chunks


def in_natural_order(gathered: Tensor, ranks: int) -> Tensor:
    """The parts of all ranks laid end to end in rank order, [row_length, ...], as the row is: a copy."""
    pieces = gathered.unflatten(0, (ranks, 2, -1))  # [ranks, 2, chunk, ...]
    return torch.cat([pieces[:, 0].flatten(0, 1), pieces[:, 1].flip(0).flatten(0, 1)])


def in_rank_order(row: Tensor, ranks: int) -> Tensor:
    """The inverse of `in_natural_order`: a row [row_length, ...] as the parts of all ranks, end to end."""
    first, second = row.unflatten(0, (2, ranks, -1))  # [ranks, chunk, ...] each
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)
