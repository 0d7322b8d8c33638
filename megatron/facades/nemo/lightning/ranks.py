"""What code of Lightning asks about ranks, before a run, during it and without one."""

import json
import os

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication.collectives import all_gather, all_reduce, broadcast, numbers_of_ranks
from megatron.core.communication.collectives import barrier as wait_for_ranks
from megatron.core.exceptions import UserError
from megatron.core.utils.rendezvous import local_device
from megatron.facades.nemo.lightning.arguments import Foreign


def rank_and_size() -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks, as the launcher or the process group says."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class RankFacts:
    """What trainers and strategies of Lightning say about ranks."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first rank."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return rank_and_size()[0]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return rank_and_size()[1]

    @property
    def local_rank(self) -> int:
        """The number of this process on its node."""
        return int(os.environ.get("LOCAL_RANK", 0))


def wait_for_all() -> None:
    """Waits for all ranks."""
    if dist.is_initialized():
        wait_for_ranks()


def gathered(tensor: Tensor) -> Tensor:
    """Returns the tensors of all ranks, which have one shape: [ranks, ...]."""
    return torch.stack(all_gather(tensor, dist.group.WORLD) if dist.is_initialized() else [tensor])


def reduced(tensor: Tensor, how: str) -> Tensor:
    """Returns the sum ("sum") or the mean of a tensor over all ranks."""
    if not dist.is_initialized():
        return tensor
    total = all_reduce(tensor.clone(), dist.group.WORLD)
    return total if how.lower().endswith("sum") else total / dist.get_world_size()


def agreed(decision: bool, by_all: bool) -> bool:
    """Returns whether all ranks decided so, or any. Waits for all ranks."""
    votes = [bool(vote) for (vote,) in numbers_of_ranks([float(decision)])]
    return all(votes) if by_all else any(votes)


def of_rank(value: Foreign, source: int) -> Foreign:
    """Returns the value of a rank on all ranks: a tensor of one shape and type, or what JSON can express."""
    if not dist.is_initialized():
        return value
    if isinstance(value, Tensor):
        return broadcast(value.clone(), dist.group.WORLD, source)
    try:
        text = json.dumps(value).encode()
    except TypeError:
        raise UserError(
            f"strategy.broadcast: a {type(value).__name__} cannot be sent; send tensors, numbers, texts and lists"
        ) from None
    device = local_device()
    length = broadcast(torch.tensor([len(text)], device=device), dist.group.WORLD, source)
    sent = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return json.loads(bytes(broadcast(sent, dist.group.WORLD, source).tolist()))
