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
    kept_bytes: int | None = None
    """Bytes that stay on this rank in an all_to_all whose parts have given sizes; None: all parts are equal."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends with the algorithm of least traffic (a ring)."""
        if self.kept_bytes is not None:
            return float(self.nbytes - self.kept_bytes)
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


def record_traffic(
    operation: str, tensor: Tensor, ranks: Callable[[], tuple[int, ...]], kept_rows: int | None = None
) -> None:
    """Adds an entry to each list of `recorded`. `ranks` is called only if there is one. `kept_rows` is the number of
    rows of the tensor that stay on this rank, if an all_to_all has given sizes."""
    if _records:
        nbytes = tensor.numel() * tensor.element_size()
        kept = None if kept_rows is None else nbytes * kept_rows // max(1, tensor.shape[0])
        entry = Traffic(operation, tensor.dtype, nbytes, ranks(), kept)
        for log in _records:
            log.append(entry)
