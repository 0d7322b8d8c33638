"""A record of the communication of this process: each collective with its type, bytes and ranks."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Traffic:
    """One call of a collective on this rank."""

    operation: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive."""
    dtype: torch.dtype
    """Type of the data that is sent."""
    nbytes: int
    """Bytes of the whole tensor: after an all_gather, or before a reduce_scatter."""
    ranks: tuple[int, ...]
    """Global ranks of the group; for a send or receive, (sender, receiver)."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends with the algorithm of least traffic (a ring)."""
        n = len(self.ranks)
        factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0 / n, "send": 1.0, "receive": 0.0}
        return self.nbytes * factor.get(self.operation, (n - 1) / n)


_records: list[list[Traffic]] = []


@contextlib.contextmanager
def recorded() -> Iterator[list[Traffic]]:
    """Yields a list to which each communication that starts inside, in this process, adds an entry."""
    log: list[Traffic] = []
    _records.append(log)
    try:
        yield log
    finally:
        _records[:] = [other for other in _records if other is not log]


def record_traffic(operation: str, tensor: Tensor, ranks: Callable[[], tuple[int, ...]]) -> None:
    """Adds an entry to each list of `recorded`. `ranks` is called only if there is one."""
    if _records:
        entry = Traffic(operation, tensor.dtype, tensor.numel() * tensor.element_size(), ranks())
        for log in _records:
            log.append(entry)
