"""Moves of activations between ranks that hold parts of a tensor and ranks that hold all of it, under published names.

Among one rank, which is what works so far, all of them are the identity; among more they raise UserError.
"""

from collections.abc import Sequence

from torch import Tensor

from megatron.core.collectives import Group
from megatron.core.process_groups_config import default_collection
from megatron.core.tensor_parallel.storage import check_group


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """The tensor itself; backward sums its gradient over the group."""
    return _among_one(input_, group)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """The sum over the group; backward gives each rank the gradient as it is."""
    return _among_one(input_, group)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """This rank's part of the last dimension; backward gathers."""
    return _among_one(input_, group)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """The parts of all ranks along the last dimension; backward takes this rank's part."""
    return _among_one(input_, group)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """The parts of all ranks along the last dimension; backward sums and takes this rank's part."""
    return _among_one(input_, group)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """This rank's part of the first dimension; backward gathers."""
    return _among_one(input_, group)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """The parts of all ranks along the first dimension; backward takes this rank's part, summed over the group with
    `tensor_parallel_output_grad`."""
    return _among_one(input_, group)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: Group = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """This rank's part, along the first dimension, of the sum over the group; backward gathers."""
    return _among_one(input_, group)


def all_to_all(
    group: Group,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Part i of the first dimension goes to rank i; backward sends gradients back."""
    check_group(group)
    return input_


def _among_one(input_: Tensor, group: Group) -> Tensor:
    check_group(group if group is not None else default_collection().tp)
    return input_
