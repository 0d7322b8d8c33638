"""Starting torch.distributed: from torchrun's environment, or not at all for a lone process."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.core.exceptions import UserError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_by_torchrun() -> bool:
    """The environment says which rank of which world this process is."""
    return all(name in os.environ for name in _TORCHRUN)


def local_device() -> torch.device:
    """The device of this process: the GPU of its local rank, or the CPU where there is none."""
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
    device: torch.device | None = None, timeout: timedelta | None = None, backend: str = "nccl"
) -> bool:
    """Join the world that torchrun describes, unless that was done; returns whether there is a world.

    `backend` (nccl or gloo) moves the tensors of a GPU. Host tensors always go over gloo.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    if not started_by_torchrun():
        return False
    device = device or local_device()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        f"cpu:gloo,cuda:{backend}" if on_gpu else "gloo",
        timeout=timeout,
        device_id=device if on_gpu and backend == "nccl" else None,
    )
    return True
