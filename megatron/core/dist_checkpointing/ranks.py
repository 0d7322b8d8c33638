"""Agreement among the ranks that save or load together: everybody goes on, or everybody gets the same kind of error.

Messages are JSON in byte tensors; nothing is pickled.
"""

import json
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.core.collectives import all_gather, all_reduce
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint
from megatron.core.exceptions import UserError

T = TypeVar("T")
Json = Any


class Ranks:
    """The ranks of a process group; one rank alone when torch.distributed is not initialised."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.group = (group or dist.group.WORLD) if several else None
        self.rank = dist.get_rank(self.group) if several else 0
        self.size = dist.get_world_size(self.group) if several else 1
        self.global_rank = dist.get_rank() if several else 0
        on_host = self.group is None or "cpu" in dist.get_backend_config(self.group)
        self._device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())

    def gather(self, value: Json) -> list[Json]:
        """Every rank's value, by rank, on every rank."""
        if self.group is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._device)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        sizes[self.rank] = mine.numel()
        counts = [int(count) for count in all_reduce(sizes, self.group).tolist()]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self._device)
        padded[: mine.numel()] = mine
        received = zip(all_gather(padded, self.group), counts, strict=True)
        return [json.loads(bytes(tensor[:count].cpu().numpy())) for tensor, count in received]

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        """Elementwise "or" of a byte vector of 0 and 1 over the ranks."""
        return all_reduce(flags.to(self._device), self.group, dist.ReduceOp.MAX).cpu()

    def together(self, action: Callable[[], T]) -> T:
        """Run the action on every rank; if it fails on any, fail on all.

        A rank that failed raises its own error, unless another rank's is of the kind that ends the whole attempt
        (anything but BrokenCheckpoint) and its own is not: then all raise that kind.
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

    def from_first(self, action: Callable[[], T]) -> T:
        """Run the action on rank 0 only; its result (JSON, or lists and dicts of it) or its error on every rank."""
        result: Json = None

        def first() -> None:
            nonlocal result
            if self.rank == 0:
                result = action()

        self.together(first)
        gathered: T = self.gather(result)[0]
        return gathered if self.rank else result


def _report(error: Exception, ranks: Ranks) -> dict[str, Json]:
    broken = [str(error.path), error.reason] if isinstance(error, BrokenCheckpoint) else None
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return {"rank": ranks.rank, "host": socket.gethostname(), "broken": broken, "text": text}


def _error(report: dict[str, Json]) -> UserError:
    where = f"rank {report['rank']} on {report['host']}"
    if report["broken"] is not None:
        path, reason = report["broken"]
        return BrokenCheckpoint(path, f"{reason} ({where})")
    return UserError(f"{where}: {report['text']}")
