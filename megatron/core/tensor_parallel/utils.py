"""Cutting tensors and vocabularies into equal parts, under published names."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.collectives import Group, group_rank, group_size
from megatron.core.exceptions import UserError
from megatron.core.process_groups_config import default_collection
from megatron.core.tensor_parallel.storage import check_group


def divide(numerator: int, denominator: int) -> int:
    """The quotient. Raises UserError if there is a remainder."""
    if numerator % denominator:
        raise UserError(f"{numerator} does not divide by {denominator}")
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts of the last dimension: views, or contiguous copies."""
    parts = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(tensor: Tensor, new_buffer: bool = False, tp_group: Group = None) -> Tensor:
    """This rank's part of the flattened tensor: a view, or a copy with `new_buffer`."""
    group = tp_group if tp_group is not None else default_collection().tp
    size = divide(tensor.numel(), group_size(group))
    part = tensor.view(-1)[group_rank(group) * size :][:size]
    return part.clone() if new_buffer else part


def gather_split_1d_tensor(tensor: Tensor, tp_group: Group = None) -> Tensor:
    """The flat tensor of which `split_tensor_into_1d_equal_chunks` gave each rank a part."""
    check_group(tp_group if tp_group is not None else default_collection().tp)
    return tensor


class VocabUtility:
    """Which rows of a vocabulary a rank holds, where it is cut evenly: [first, last)."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """From the rows of one rank."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> Sequence[int]:
        """From the rows of all ranks together."""
        rows = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(rows, rank, world_size)


def broadcast_data(
    keys: Sequence[str], data: dict[str, Tensor], datatype: torch.dtype, tp_group: Group = None
) -> dict[str, Tensor]:
    """The tensors of the group's first rank, on the current device. Raises UserError for one of another type."""
    check_group(tp_group if tp_group is not None else default_collection().tp)
    for key in keys:
        if data[key].dtype is not datatype:
            raise UserError(f"{key} is {data[key].dtype}, not {datatype}")
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    return {key: data[key].to(device) for key in keys}
