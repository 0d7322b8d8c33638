"""Coordination of the ranks that save or load together: all ranks continue, or all raise the same kind of error.

Messages are JSON in byte tensors; nothing is pickled.
"""

import json
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.core.communication.collectives import all_gather, all_reduce
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint
from megatron.core.exceptions import UserError

T = TypeVar("T")
Json = Any


class RankCoordinator:
    """The ranks of a process group, or a single rank if torch.distributed is not initialized. All methods are
    collective."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.group = (group or dist.group.WORLD) if several else None
        self.rank = dist.get_rank(self.group) if several else 0
        self.size = dist.get_world_size(self.group) if several else 1
        self.global_rank = dist.get_rank() if several else 0
        on_host = self.group is None or "cpu" in dist.get_backend_config(self.group)
        self.device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())

    def gather(self, value: Json) -> list[Json]:
        """Returns the JSON values of all ranks, by rank."""
        if self.group is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = mine.numel()
        counts = [int(count) for count in all_reduce(sizes, self.group).tolist()]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self.device)
        padded[: mine.numel()] = mine
        received = zip(all_gather(padded, self.group), counts, strict=True)
        return [json.loads(bytes(tensor[:count].cpu().numpy())) for tensor, count in received]

    def any_rank(self, flags: torch.Tensor) -> torch.Tensor:
        """Returns the elementwise "or" over all ranks of a uint8 vector of zeros and ones, on the CPU."""
        return all_reduce(flags.to(self.device), self.group, dist.ReduceOp.MAX).cpu()

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Runs the action on all ranks and returns its result. If it fails on one rank, it fails on all.

        If all errors are BrokenCheckpoint, all ranks raise BrokenCheckpoint. Otherwise all ranks raise another error,
        so that no rank tries an older checkpoint. A rank whose own error is of the right kind raises that one.
        """
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        reports = self.gather(None if failure is None else _report(failure, self))
        failed = [report for report in reports if report is not None]
        if not failed:
            return result
        chosen = min(failed, key=lambda report: (report["broken"] is not None, report["rank"]))
        if failure is not None and isinstance(failure, BrokenCheckpoint) == (chosen["broken"] is not None):
            raise failure
        raise _error(chosen)

    def run_on_first(self, action: Callable[[], T]) -> T:
        """Runs the action on rank 0 and returns its result (a JSON value) on all ranks. If it fails, all ranks
        raise."""
        result: Json = None

        def first() -> None:
            nonlocal result
            if self.rank == 0:
                result = action()

        self.run_on_all(first)
        gathered: T = self.gather(result)[0]
        return gathered if self.rank else result


def _report(error: Exception, ranks: RankCoordinator) -> dict[str, Json]:
    broken = [str(error.path), error.reason] if isinstance(error, BrokenCheckpoint) else None
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return {"rank": ranks.rank, "host": socket.gethostname(), "broken": broken, "text": text}


def _error(report: dict[str, Json]) -> UserError:
    where = f"rank {report['rank']} on {report['host']}"
    if report["broken"] is not None:
        path, reason = report["broken"]
        return BrokenCheckpoint(path, f"{reason} ({where})")
    return UserError(f"{where}: {report['text']}")
