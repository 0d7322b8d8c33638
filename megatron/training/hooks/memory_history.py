"""--record-memory-history: snapshots of the allocations of GPU memory, for https://pytorch.org/memory_viz."""

from collections.abc import Callable
from pathlib import Path

import torch

from megatron.core.exceptions import UserError
from megatron.core.utils.torch_private import dump_memory_snapshot, record_memory_history
from megatron.training.hooks.hook import Hook

MAX_ENTRIES = 100_000
"""Allocations and releases that torch keeps; older ones are dropped."""


class MemoryHistory(Hook):
    """Records allocations from the first step on. Writes a snapshot at each log line and when the run ends, also after
    an error such as lack of memory; the newest replaces the one before.

    `record` and `dump` are torch's functions. Raises UserError if the snapshot cannot be written when the run starts.
    """

    def __init__(
        self,
        path: Path,
        log_interval: int,
        record: Callable[[int | None], None] = record_memory_history,
        dump: Callable[[str], None] = dump_memory_snapshot,
    ) -> None:
        self.path = path
        self._interval = log_interval
        self._record, self._dump = record, dump

    def on_start(self, iteration: int) -> None:
        """Starts the recording."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        except OSError as error:
            raise UserError(f"--memory-snapshot-path {self.path}: {error.strerror}") from None
        self._record(MAX_ENTRIES)

    def after_step(self, iteration: int) -> None:
        """Writes a snapshot if a log line is due."""
        if iteration % self._interval == 0:
            self._write()

    def on_exit(self, iteration: int) -> None:
        """Writes the last snapshot and ends the recording."""
        self._write()
        self._record(None)
        print(f"--record-memory-history: {self.path} has the last {MAX_ENTRIES:,} allocations", flush=True)

    def _write(self) -> None:
        aside = self.path.with_name(f".{self.path.name}.tmp")
        self._dump(str(aside))
        aside.replace(self.path)


def make_memory_history(path: str, rank: int, ranks: list[int], log_interval: int) -> MemoryHistory | None:
    """Returns the hook for a rank; None on ranks that are not in `ranks` and, with a printed line, without CUDA.

    The first of `ranks` writes to `path`; the others write to files beside it with their rank in the name.
    """
    if rank not in ranks:
        return None
    if not torch.cuda.is_available():
        print("--record-memory-history: nothing is recorded, since only allocations on GPUs can be", flush=True)
        return None
    place = Path(path)
    return MemoryHistory(place if rank == ranks[0] else place.with_stem(f"{place.stem}.rank_{rank:05d}"), log_interval)
