"""Megatron-LM's small functions on pipeline stages."""

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group, group_rank, group_ranks, group_size


def is_pp_first_stage(pp_group: Group) -> bool:
    """Returns whether this rank is the first of a pipeline group."""
    return group_rank(pp_group) == 0


def is_pp_last_stage(pp_group: Group) -> bool:
    """Returns whether this rank is the last of a pipeline group."""
    return group_rank(pp_group) == group_size(pp_group) - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Returns whether a chunk is the first of its rank's `vp_size`; True without virtual stages."""
    return not vp_size or vp_size <= 1 or vp_stage == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Returns whether a chunk is the last of its rank's `vp_size`; True without virtual stages."""
    return not vp_size or vp_size <= 1 or vp_stage == vp_size - 1


def get_pp_first_rank(pp_group: Group) -> int:
    """Returns the global rank of a pipeline group's first rank."""
    return group_ranks(pp_group)[0]


def get_pp_last_rank(pp_group: Group) -> int:
    """Returns the global rank of a pipeline group's last rank."""
    return group_ranks(pp_group)[-1]


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Returns `inp` if it is not a view, else a new tensor on its memory that is not a view.

    A stage that frees an output after sending it would keep the memory alive through a view. With `keep_graph`
    gradients flow to `inp`; otherwise the result is a leaf with this `requires_grad`.
    """
    if inp._base is None:
        return inp
    return _Viewless.apply(inp) if keep_graph else _without_base(inp, requires_grad)


def _without_base(inp: Tensor, requires_grad: bool) -> Tensor:
    out = torch.empty((1,), dtype=inp.dtype, device=inp.device, requires_grad=requires_grad)
    out.data = inp.data
    return out


class _Viewless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, inp: Tensor) -> Tensor:
        return _without_base(inp, inp.requires_grad)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0]
