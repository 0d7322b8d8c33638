"""Runs a function on the ranks of a small gloo world, each in a process of its own."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from support.forkserver import forkserver
from support.pool import Pool

__all__ = ["forkserver", "run_on_ranks"]


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Calls function(*args) on every rank of a new world of torch.distributed and returns the results in rank order.

    The function is a module-level one of a test module. Raises AssertionError with the tracebacks of all ranks that
    failed. The processes end with the call, so that nothing they changed is left.
    """
    with Pool(world_size) as pool:
        results = pool.run(function, world_size, *args)
        pool.run(_leave, world_size)
    return results


def _leave() -> None:
    # The barrier hangs if ranks have not called the same collectives.
    dist.barrier()
    dist.destroy_process_group()
