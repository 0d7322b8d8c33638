"""Starts torch.distributed from the environment variables of torchrun."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.exceptions import UserError
from megatron.core.utils.activity import activity

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_by_torchrun() -> bool:
    """Whether the environment has the rank and the world size of this process."""
    return all(name in os.environ for name in _TORCHRUN)


def local_device() -> torch.device:
    """Returns the device of this process: the GPU of its local rank, or the CPU on a machine without GPU. Raises
    UserError if there are fewer GPUs than local ranks."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"LOCAL_RANK {local_rank} has no GPU: this machine shows {torch.cuda.device_count()}; "
            f"start at most that many processes on it"
        )
    return torch.device("cuda", local_rank)


def start_torch_distributed(
    device: torch.device | None = None,
    timeout: timedelta | None = None,
    backend: str = "nccl",
    alone: bool = False,
    on_store: Callable[[dist.Store, int, int], object] | None = None,
) -> bool:
    """Joins the world that torchrun describes, unless this was done before. Returns whether there is a world.

    `backend` (nccl or gloo) communicates GPU tensors. Host tensors always use gloo. Without torchrun there is no world;
    with `alone` there is one of this process, for scripts that call torch.distributed themselves. `on_store` is called
    with a store that all ranks reach, the rank and the number of ranks, before the ranks connect to each other; not for
    a world of one.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    if not started_by_torchrun() and not alone:
        return False
    device = device or local_device()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    here: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if started_by_torchrun():
        waits: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        store, rank, size = next(dist.rendezvous("env://", **waits))
        if timeout is not None:
            store.set_timeout(timeout)
        if on_store is not None and size > 1:
            on_store(dist.PrefixStore("before groups", store), rank, size)
        here = {"store": dist.PrefixStore("world", store), "rank": rank, "world_size": size}
    everyone = tuple(range(here["world_size"]))
    with activity.waiting(activity.begin("init_process_group", "init_process_group", lambda: everyone)):
        dist.init_process_group(
            f"cpu:gloo,cuda:{backend}" if on_gpu else "gloo",
            timeout=timeout,
            device_id=device if on_gpu and backend == "nccl" else None,
            **here,
        )
    return True
