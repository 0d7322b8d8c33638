"""Saves a checkpoint while training continues: the state is copied to host memory, and a thread writes the copy.

The files and their order on disk are those of `writing.save`, so a kill at any point is harmless. Training waits only
for the copy. Rank 0's thread publishes the checkpoint when it sees the index file of every rank, without a collective.
In `PendingSave.finish` all ranks learn whether the save worked.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.folders import Step
from megatron.core.dist_checkpointing.manifest import index_name
from megatron.core.dist_checkpointing.planning import assign_writes
from megatron.core.dist_checkpointing.rank_file import write_rank
from megatron.core.dist_checkpointing.store_disk import disk_at
from megatron.core.dist_checkpointing.writing import Contents, SaveResult, begin, publisher
from megatron.core.utils.store_path import StorePath

_POLL_SECONDS = 0.05
_STORE_POLL_SECONDS = 1.0
"""For a store, which may charge for each request."""
_ALIGNMENT = 64


class StagingMemory:
    """Host memory for the copy of a rank's chunks, kept from one save to the next; page-locked if they are on a GPU."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copy(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Returns the chunks with tensors in this memory. They are valid until the next call. Waits for the device."""
        sizes = [-(-chunk.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for chunk in chunks]
        devices = {chunk.tensor.device for chunk in chunks if chunk.tensor.is_cuda}
        if self._bytes.numel() < sum(sizes):
            self._bytes = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._bytes = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=bool(devices))
        for device in devices:
            torch.cuda.synchronize(device)  # any stream may still be writing the tensors
        copies, offset = [], 0
        for chunk, size in zip(chunks, sizes, strict=True):
            memory = self._bytes[offset : offset + chunk.tensor.nbytes].view(chunk.tensor.dtype)
            copies.append(replace(chunk, tensor=memory.copy_(chunk.values(), non_blocking=True), encoded=None))
            offset += size
        for device in devices:
            torch.cuda.synchronize(device)
        return copies


class PendingSave:
    """A checkpoint that a thread of each rank writes. `begin_save` starts it; every rank calls `finish` once."""

    def __init__(
        self,
        ranks: RankCoordinator,
        disk: Disk,
        temporary: Path,
        chunks: Sequence[Chunk],
        publish: Callable[[Path], dict[str, Any]],
        result: SaveResult,
        announce: Callable[[SaveResult], None],
    ) -> None:
        self._announce = announce
        self._ranks, self._disk, self._temporary, self._publish = ranks, disk, temporary, publish
        self._result = result
        self._started = time.monotonic()
        self._written, self._abandoned = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self._done = False
        self._thread = threading.Thread(target=self._run, args=(chunks,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Waits until this rank's thread has ended, but not longer. Not collective."""
        self._thread.join(seconds)

    def finish(self) -> None:
        """Waits until the checkpoint is complete on disk. Collective. If one rank has failed, all ranks raise
        UserError, earlier checkpoints stay as they were, and no partial files remain."""
        self._written.wait()
        try:
            self._ranks.run_on_all(self._raise_failure)
            self._ranks.run_on_first(self._join)
        except Exception:
            self._abandoned.set()
            self._thread.join()
            if self._ranks.rank == 0:
                self._disk.discard(self._temporary)
            raise

    def _run(self, chunks: Sequence[Chunk]) -> None:
        try:
            try:
                write_rank(self._disk, self._temporary, self._ranks.rank, chunks, index_appears_whole=True)
            finally:
                self._written.set()
            if self._ranks.rank == 0 and self._all_ranks_wrote():
                done = self._publish(self._temporary)
                self._done = True
                seconds, notes = time.monotonic() - self._started, [*self._result.notes, *done["notes"]]
                self._announce(replace(self._result, nbytes=done["nbytes"], seconds=seconds, notes=notes))
        except Exception as error:
            self._failure = error

    def _all_ranks_wrote(self) -> bool:
        """Waits for the index files of all ranks, which get their names when they are complete. Returns False if
        `finish` has cancelled the checkpoint."""
        missing = [self._temporary / index_name(rank, self._disk.mark) for rank in range(self._ranks.size)]
        while not self._abandoned.is_set():
            missing = [path for path in missing if not path.exists()]
            if not missing:
                return True
            self._abandoned.wait(_STORE_POLL_SECONDS if isinstance(self._temporary, StorePath) else _POLL_SECONDS)
        return False

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _join(self) -> None:
        self._thread.join()
        self._raise_failure()
        assert self._done


def begin_save(
    root: Path,
    chunks: Iterable[Chunk],
    memory: StagingMemory,
    *,
    step: Step,
    common: Mapping[str, Any],
    config: Mapping[str, Any],
    layout: Mapping[str, Any],
    weights_finite: bool | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    group: dist.ProcessGroup | None = None,
    disk: Disk | None = None,
    announce: Callable[[SaveResult], None] = lambda saved: None,
) -> PendingSave:
    """Copies this rank's chunks to `memory` and starts the thread that writes them. Collective; arguments and errors
    are those of `writing.save`. The chunks may change as soon as this returns. The previous save must be finished.

    `announce` is called on rank 0, in the thread, once the checkpoint is complete on disk.
    """
    ranks, disk = RankCoordinator(group), disk or disk_at(root)
    temporary, notes = begin(ranks, disk, root, step, common)
    contents = Contents(ranks.size, common, config, layout, weights_finite)
    publish = publisher(disk, step, contents, keep_last, keep_every)
    result = SaveResult(root / folders.folder_name(step), 0, 0.0, notes)
    staged = ranks.run_on_all(lambda: memory.copy(assign_writes(chunks, ranks.global_rank)))
    return PendingSave(ranks, disk, temporary, staged, publish, result, announce)
