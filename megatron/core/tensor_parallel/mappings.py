"""Communication of activations in forward and of their gradients in backward, under Megatron-LM's names. In a group of
one rank every function is the identity."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import (
    Group,
    all_gather,
    all_reduce,
    all_to_all_rows,
    gather_rows,
    group_rank,
    group_size,
    reduce_scatter_rows,
)
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import tp_group_or_default
from megatron.core.utils.autograd_context import AutogradContext

Move = Callable[[Tensor], Tensor]


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Returns the tensor; backward sums its gradient over the group."""
    group = _tensor_parallel(group)
    return _moved(input_, group, _same, lambda g: all_reduce(g.clone(), group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Returns the sum over the group; backward passes the gradient on unchanged."""
    group = _tensor_parallel(group)
    return _moved(input_, group, lambda x: all_reduce(x.clone(memory_format=torch.contiguous_format), group), _same)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Returns this rank's part of the last dimension; backward gathers."""
    group = _tensor_parallel(group)
    return _moved(input_, group, lambda x: _own_part(x, -1, group), lambda g: _gather_last(g, group))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Gathers the parts of all ranks along the last dimension; backward takes this rank's part."""
    group = _tensor_parallel(group)
    return _moved(input_, group, lambda x: _gather_last(x, group), lambda g: _own_part(g, -1, group))


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Gathers the parts of all ranks along the last dimension; backward sums over the group and takes this rank's
    part."""
    group = _tensor_parallel(group)

    def reduce_scatter_last(gradient: Tensor) -> Tensor:
        parts = torch.stack(gradient.chunk(group_size(group), -1))  # [ranks, ..., n]
        return reduce_scatter_rows(parts, group)[0]

    return _moved(input_, group, lambda x: _gather_last(x, group), reduce_scatter_last)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Returns this rank's part of the first dimension; backward gathers."""
    group = _tensor_parallel(group)
    return _moved(input_, group, lambda x: _own_part(x, 0, group), lambda g: gather_rows(g, group))


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Gathers the parts of all ranks along the first dimension, of equal size or of `output_split_sizes`; backward
    takes this rank's part, summed over the group with `tensor_parallel_output_grad`. `use_global_buffer` has no
    effect."""
    group = _tensor_parallel(group)
    sizes = output_split_sizes
    backward: Move
    if tensor_parallel_output_grad:
        backward = lambda g: _reduce_scatter_first(g, group, sizes)  # noqa: E731
    else:
        backward = lambda g: _own_part(g, 0, group, sizes)  # noqa: E731
    return _moved(input_, group, lambda x: _gather_first(x, group, sizes), backward)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: Group = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Returns this rank's part, along the first dimension, of the sum over the group; backward gathers. Parts are of
    equal size, or of `input_split_sizes`. `use_global_buffer` has no effect."""
    group = _tensor_parallel(group)
    sizes = input_split_sizes
    return _moved(
        input_, group, lambda x: _reduce_scatter_first(x, group, sizes), lambda g: _gather_first(g, group, sizes)
    )


def all_to_all(
    group: Group,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sends part i of the first dimension to rank i; backward sends gradients back. Parts are of equal size, or of the
    sizes given."""
    out, into = output_split_sizes_, input_split_sizes
    return _moved(
        input_, group, lambda x: all_to_all_rows(x, group, out, into), lambda g: all_to_all_rows(g, group, into, out)
    )


def reduce_in_place(partial: Tensor, group: Group) -> Tensor:
    """Does `reduce_from_tensor_model_parallel_region` in place. The argument must be the result of an operation that
    does not need it in backward."""
    return partial if group_size(group) == 1 else _ReduceInPlace.apply(partial, group)


# ---------------------------------------------------------------------------------------------------------------------


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, move: Move, move_gradient: Move) -> Tensor:
        ctx.move_gradient = move_gradient
        return move(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.move_gradient(gradient), None, None


class _ReduceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, partial: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(partial)
        return all_reduce(partial, group)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _moved(tensor: Tensor, group: Group, move: Move, move_gradient: Move) -> Tensor:
    return tensor if group_size(group) == 1 else _Moved.apply(tensor, move, move_gradient)


def _tensor_parallel(group: Group) -> Group:
    return tp_group_or_default(group)


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _own_part(tensor: Tensor, dim: int, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    ranks, extent = group_size(group), tensor.shape[dim]
    if sizes is not None:
        return tensor.split(list(sizes), dim)[group_rank(group)].contiguous()
    if extent % ranks:
        raise UserError(f"a dimension of {extent} (shape {tuple(tensor.shape)}) is not divisible by {ranks} ranks")
    return tensor.narrow(dim, extent // ranks * group_rank(group), extent // ranks).contiguous()


def _gather_last(tensor: Tensor, group: Group) -> Tensor:
    return torch.cat(all_gather(tensor, group), -1)


def _gather_first(tensor: Tensor, group: Group, sizes: Sequence[int] | None) -> Tensor:
    if sizes is None:
        return gather_rows(tensor, group)
    # Collectives need equal parts: shorter ones are padded with rows that are dropped.
    parts = gather_rows(_lengthened(tensor, max(sizes)), group).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_first(tensor: Tensor, group: Group, sizes: Sequence[int] | None) -> Tensor:
    if sizes is None:
        if tensor.shape[0] % group_size(group):
            raise UserError(f"{tensor.shape[0]} rows are not divisible by {group_size(group)} ranks")
        return reduce_scatter_rows(tensor, group)
    parts = torch.cat([_lengthened(part, max(sizes)) for part in tensor.split(list(sizes))])
    return reduce_scatter_rows(parts, group)[: sizes[group_rank(group)]]


def _lengthened(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])
