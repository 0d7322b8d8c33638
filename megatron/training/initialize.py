"""The processes of a run: who am I, on which device, in which groups.

`process_environment` is a context manager, so that a run can be set up and closed twice in one process, with other
sizes.
"""

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.exceptions import UserError
from megatron.core.process_groups_config import (
    ProcessGroupCollection,
    default_collection,
    has_default_collection,
    set_default_collection,
)
from megatron.core.rank_grid import RankGrid
from megatron.core.utils.rendezvous import local_device, start_torch_distributed


@dataclass(frozen=True)
class Environment:
    """This process among those of the run."""

    rank: int
    world_size: int
    device: torch.device
    groups: ProcessGroupCollection

    @property
    def is_first(self) -> bool:
        """The process that prints what is the same on all."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """The process that has the losses, and so prints the log line."""
        return self.rank == self.world_size - 1


@contextlib.contextmanager
def process_environment(
    grid: RankGrid, *, timeout_minutes: float = 10.0, backend: str | None = None
) -> Iterator[Environment]:
    """Join the run that torchrun started, or be a run of one process without it; leave it at the end.

    `backend` is what moves the device's tensors (nccl or gloo); host tensors always go over gloo.

    Within, the groups are the default of user scripts. A process group that exists already (a user's, or a test's) is
    used and left standing. Raises UserError when the number of processes is not the grid's.
    """
    device = local_device()
    timeout = timedelta(minutes=timeout_minutes)
    mine = not dist.is_initialized() and start_torch_distributed(device, timeout, backend or "nccl")
    try:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size != grid.world_size:
            raise UserError(f"the run is laid out for {grid.world_size} processes and {world_size} were started")
        rank = dist.get_rank() if dist.is_initialized() else 0
        groups = ProcessGroupCollection.from_grid(grid, rank, timeout=timeout)
        with default_groups(groups):
            yield Environment(rank, world_size, device, groups)
    finally:
        if mine and dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def default_groups(groups: ProcessGroupCollection) -> Iterator[None]:
    """Within, user scripts find these groups: parallel_state's functions, public constructors called without groups."""
    before = default_collection() if has_default_collection() else None
    set_default_collection(groups)
    try:
        yield
    finally:
        set_default_collection(before)


def __getattr__(name: str) -> Any:
    """The published home of a function that stands, with its like, where it may import the rest of the app."""
    if name == "initialize_megatron":
        return importlib.import_module("megatron.training.published").initialize_megatron
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
