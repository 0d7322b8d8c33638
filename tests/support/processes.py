"""Run a function on the ranks of a small gloo world, in real processes."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

forkserver = multiprocessing.get_context("forkserver")
# The server imports these once and forks the ranks: a world starts in a fraction of a second.
forkserver.set_forkserver_preload(["torch", "torch.distributed", "numpy", "megatron.training.training", "pretrain_gpt"])

TIMEOUT = 120.0
"""Seconds until a world that hangs is given up."""


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """function(*args) on every rank, with torch.distributed up; returns what each rank returned, in rank order.

    The function is a module-level one of a test module. A rank that raises fails the caller with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(world_size):
            ours, theirs = forkserver.Pipe(duplex=False)
            process = forkserver.Process(
                target=_rank_main, args=(theirs, function, rank, world_size, os.path.join(folder, "store"), args)
            )
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(ours)
        try:
            return _collect(ends)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(ends: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(zip(ends, range(len(ends)), strict=True))
    while waiting and not failures:
        ready = wait(list(waiting), timeout=TIMEOUT)
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} gave no answer in {TIMEOUT:.0f} s")
        for end in ready:
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                ok, payload = pickle.loads(end.recv_bytes())
            except EOFError:
                ok, payload = False, "ended without an answer"
            (results if ok else failures)[rank] = payload
    if failures:
        raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(ends))]


def _rank_main(
    end: Connection, function: Callable[..., Any], rank: int, world_size: int, store: str, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT),
        )
        answer = pickle.dumps((True, function(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    end.send_bytes(answer)
    end.close()
