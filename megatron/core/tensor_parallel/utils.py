"""Splitting of tensors and vocabularies into equal parts, under Megatron-LM's names."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group, broadcast, gather_rows, group_rank, group_size
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import tp_group_or_default


def divide(numerator: int, denominator: int) -> int:
    """Returns the quotient. Raises UserError if there is a remainder."""
    if numerator % denominator:
        raise UserError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises UserError if there is a remainder."""
    divide(numerator, denominator)


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Returns equal parts of the last dimension: views, or contiguous copies."""
    parts = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(tensor: Tensor, new_buffer: bool = False, tp_group: Group = None) -> Tensor:
    """Returns this rank's part of the flattened tensor: a view, or a copy with `new_buffer`."""
    group = tp_group_or_default(tp_group)
    size = divide(tensor.numel(), group_size(group))
    part = tensor.view(-1)[group_rank(group) * size :][:size]
    return part.clone() if new_buffer else part


def gather_split_1d_tensor(tensor: Tensor, tp_group: Group = None) -> Tensor:
    """Gathers the flat tensor that `split_tensor_into_1d_equal_chunks` has split."""
    return gather_rows(tensor, tp_group_or_default(tp_group))


class VocabUtility:
    """The range of vocabulary rows [first, last) of a rank, in an even split."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Returns the range, given the number of rows per rank."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> Sequence[int]:
        """Returns the range, given the number of rows of all ranks."""
        rows = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(rows, rank, world_size)


_MOST_DIMENSIONS = 8


def broadcast_data(
    keys: Sequence[str], data: dict[str, Tensor] | None, datatype: torch.dtype, tp_group: Group = None
) -> dict[str, Tensor]:
    """Returns the tensors of the group's first rank, on the current device; those of other ranks are ignored. Waits for
    the device once, for the shapes. Raises UserError, on all ranks, for a tensor of another type."""
    group = tp_group_or_default(tp_group)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    tensors = [data[key] for key in keys] if data is not None and group_rank(group) == 0 else None
    shapes = broadcast(_shapes(tensors, datatype, len(keys)).to(device), group).tolist()
    wrong = [key for key, (is_right, *_) in zip(keys, shapes, strict=True) if not is_right]
    if wrong:
        raise UserError(f"not {datatype}: {', '.join(wrong)}")
    sizes = [shape[2 : 2 + shape[1]] for shape in shapes]
    counts = [math.prod(size) for size in sizes]
    if tensors is not None:
        flat = torch.cat([tensor.to(device).reshape(-1) for tensor in tensors])
    else:
        flat = torch.empty(sum(counts), dtype=datatype, device=device)
    parts = broadcast(flat, group).split(counts)
    return {key: part.view(size) for key, part, size in zip(keys, parts, sizes, strict=True)}


def _shapes(tensors: Sequence[Tensor] | None, datatype: torch.dtype, count: int) -> Tensor:
    """Returns for each tensor: whether it has the type, its number of dimensions, its sizes; zeros for missing
    tensors."""
    rows = torch.zeros(count, 2 + _MOST_DIMENSIONS, dtype=torch.int64)
    for row, tensor in zip(rows, tensors or (), strict=False):
        row[0], row[1] = tensor.dtype is datatype, tensor.dim()
        row[2 : 2 + tensor.dim()] = torch.tensor(tensor.shape)
    return rows
