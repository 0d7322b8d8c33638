"""The collectives that the library uses, as one reads them: a group of None or of one rank means nothing to do.

Every communication goes through here, so that dtype and bytes can be seen in one place.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

Group = ProcessGroup | None
"""None is a group of one."""


def group_size(group: Group) -> int:
    """Ranks of a group."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """This rank's place in a group."""
    return 0 if group is None else dist.get_rank(group)


def all_reduce(tensor: Tensor, group: Group, op: ReduceOp.RedOpType = ReduceOp.SUM) -> Tensor:
    """Reduce in place over a group; returns the tensor. On CUDA the host does not wait."""
    if group_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def start_all_reduce(tensor: Tensor, group: Group, op: ReduceOp.RedOpType = ReduceOp.SUM) -> Work | None:
    """Begin a reduction in place; `wait()` on what comes back, if anything, before reading the tensor."""
    if group_size(group) == 1:
        return None
    return dist.all_reduce(tensor, op=op, group=group, async_op=True)


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> Tensor:
    """Copy the tensor of the rank at place `source` of the group to all its ranks, in place; returns the tensor."""
    if group is not None and group_size(group) > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)
    return tensor


def all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """The tensors of all ranks of a group, all of one shape and type, in group order."""
    if group_size(group) == 1:
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(group_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def averages_in_collective(tensor: Tensor, group: Group) -> bool:
    """The group's backend can average this tensor by itself."""
    return tensor.is_cuda and group is not None and "nccl" in dist.get_backend_config(group)


def barrier(group: Group = None) -> None:
    """Wait for all ranks of a group; None: of the world."""
    if dist.is_available() and dist.is_initialized():
        if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group):
            dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
        else:
            dist.barrier(group=group)
