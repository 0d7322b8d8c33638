"""Starts torch.distributed from the environment variables of torchrun."""

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.exceptions import UserError
from megatron.core.utils.activity import activity
from megatron.core.utils.world_store import connect_to_store, wait_for_ranks

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"


def started_by_torchrun() -> bool:
    """Whether the environment has all variables of torchrun that describe a process's place in the world."""
    return all(name in os.environ for name in _TORCHRUN)


def check_torchrun_variables() -> None:
    """Raises UserError if only some of torchrun's variables are set and they describe more than this process, or if one
    of them is not a number in its range. MASTER_PORT is read only if the three others are set, because Kubernetes sets
    it to an address in every pod if there is a service named "master"."""
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    missing = [name for name in _TORCHRUN if name not in os.environ]
    port = _number("MASTER_PORT") if not missing else None
    if port is not None and not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT {port} (environment variable): ports are 1 to 65535")
    if given and missing and size != 1:
        values = " and ".join(f"{name}={os.environ[name]}" for name in given)
        raise UserError(
            f"the environment has {values} but no {' and no '.join(missing)}; start the run with torchrun, which sets "
            f"all of them, or unset {' and '.join(given)} to train with one process"
        )
    if rank is not None and size is not None and rank >= size:
        raise UserError(f"RANK {rank} (environment variable): with WORLD_SIZE {size} ranks are 0 to {size - 1}")


def _number(name: str) -> int | None:
    """Returns the number in an environment variable, None if it is not set. Raises UserError for other text."""
    text = os.environ.get(name)
    if text is not None and not text.isdecimal():
        raise UserError(f"{name} {text!r} (environment variable): expected a number")
    return None if text is None else int(text)


def local_device() -> torch.device:
    """Returns the device of this process: the GPU of its local rank, or the CPU on a machine without GPU. If ranks may
    share GPUs, they are distributed over the GPUs in turn. Raises UserError if LOCAL_RANK is not a number or has no
    GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, present = _number("LOCAL_RANK") or 0, torch.cuda.device_count()
    if local_rank >= present and not ranks_may_share_gpus():
        raise UserError(
            f"LOCAL_RANK {local_rank} has no GPU: this machine shows {present}; start at most that many processes on "
            f"it, or let processes share a GPU by the environment variable {_SHARE_GPUS}=1, with NCCL 2.30 or newer "
            f"(slow: for trying layouts)"
        )
    return torch.device("cuda", local_rank % present)


def ranks_may_share_gpus() -> bool:
    """Whether the environment lets NCCL have several ranks on one GPU (NCCL 2.30 and newer)."""
    return os.environ.get(_SHARE_GPUS) == "1"


_starts = itertools.count()
"""How often this process has joined a world: every rank does so equally often."""


def start_torch_distributed(
    device: torch.device | None = None,
    timeout: timedelta | None = None,
    backend: str = "nccl",
    alone: bool = False,
    on_store: Callable[[dist.Store, int, int], object] | None = None,
) -> bool:
    """Joins the world that torchrun describes, unless the process has joined already. Returns whether there is a world.

    `backend` (nccl or gloo) communicates GPU tensors. Host tensors always use gloo. Without torchrun there is no world;
    with `alone` the world is this process, for scripts that call torch.distributed themselves. `on_store` is called
    with (a store that all ranks can reach, the rank, the number of ranks) before the ranks connect to each other; it is
    not called for a world of one. Raises UserError like `check_torchrun_variables`, and StartFailed if the ranks do not
    find each other.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    check_torchrun_variables()
    if not started_by_torchrun() and not alone:
        return False
    device = device or local_device()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    here: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if started_by_torchrun():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # A script may start several runs one after the other, and torchrun's store keeps the addresses of the first.
        store = dist.PrefixStore(f"start {next(_starts)}", connect_to_store(rank, size, timeout))
        before = dist.PrefixStore("before groups", store)
        if on_store is not None and size > 1:
            on_store(before, rank, size)
        here = {"store": dist.PrefixStore("world", store), "rank": rank, "world_size": size}
    everyone = tuple(range(here["world_size"]))
    with activity.waiting(activity.begin("init_process_group", "init_process_group", lambda: everyone)):
        if started_by_torchrun():
            wait_for_ranks(before, rank, size, timeout)
        dist.init_process_group(
            f"cpu:gloo,cuda:{backend}" if on_gpu else "gloo",
            timeout=timeout,
            device_id=device if on_gpu and backend == "nccl" else None,
            **here,
        )
    return True


def is_first_to_claim(store: dist.Store, key: str, name: str, seconds: float = 3.0) -> bool:
    """Returns whether this process is the first to claim a key of the store under a name of its own. Also returns True
    if the store does not answer, because its server may have ended. Another thread may be waiting in the store
    meanwhile."""
    claimed: list[bytes] = []

    def claim() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            _look_for_server(store)
            own = store.clone()  # type: ignore[attr-defined]  # a thread that waits in the store keeps its connection
            claimed.append(own.compare_set(key, "", name))

    thread = threading.Thread(target=claim, name="claim", daemon=True)
    thread.start()
    thread.join(seconds)
    return not claimed or bytes(claimed[0]) == name.encode()


def _look_for_server(store: dist.Store) -> None:
    """Raises OSError if no server listens at the store's address. A request to it would print torch's warnings."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        socket.create_connection((store.host, store.port), timeout=2.0).close()
