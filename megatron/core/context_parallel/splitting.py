"""The zig-zag split of rows over context parallel ranks (see `megatron.core.tokens.SequencePart`)."""

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.tokens import SequencePart


def sequence_part(groups: ProcessGroupCollection, num_ranks: int | None = None) -> SequencePart | None:
    """Returns the part of every row that this rank holds; None: whole rows. Does not communicate.

    `num_ranks`, for a micro-batch of dynamic context parallelism: the number of neighbouring data and context parallel
    ranks that share it. The first call for a number waits for these ranks, which make their group.
    """
    if num_ranks is not None:
        rank = groups.rank("dp_cp") % num_ranks
        return None if num_ranks == 1 else SequencePart(rank, num_ranks, groups.neighbours("dp_cp", num_ranks))
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
    return _in_order(gathered, [2 * k if k < ranks else 4 * ranks - 2 * k - 1 for k in range(2 * ranks)])


def in_rank_order(row: Tensor, ranks: int) -> Tensor:
    """Reorders a row [row_length, ...] into the parts of all ranks, in rank order: the inverse of
    `in_natural_order`."""
    return _in_order(row, [number for rank in range(ranks) for number in (rank, 2 * ranks - 1 - rank)])


def _in_order(rows: Tensor, chunks: list[int]) -> Tensor:
    """Returns the equal chunks of rows in another order. One copy each in forward and in backward."""
    pieces = rows.split(len(rows) // len(chunks))
    return torch.cat([pieces[number] for number in chunks])
