"""Copies of the state of each rank in folders of its host, and of other ranks, for the case that their host is lost.

ROOT/of_rank_00003/by_rank_00003/iter_0001000/    what rank 3 holds, written by itself
ROOT/of_rank_00003/by_rank_00007/iter_0001000/    the same files, sent to rank 7, in ROOT on rank 7's host
ROOT/of_rank_00003/by_rank_00003/spare/           an older copy, which is never read: the next one is written over it

Each folder is that of a checkpoint (manifest, index, data file) with the files of one rank, and has everything that
this rank holds: a rank that is still there reads its own copy, and only what is lost is sent. A copy thus serves the
layout that has written it. Copies of an iteration count once all ranks have one; only then are older ones retired.
Every rank looks into all of ROOT on its host, so ranks may come back in another order. ROOT may be in host memory
(`/dev/shm`).
"""

import contextlib
import math
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.async_saving import StagingMemory
from megatron.core.dist_checkpointing.checkpoint import broken_tensors, open_checkpoint
from megatron.core.dist_checkpointing.checkpoint_selection import Log
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.disk import Disk, cannot_write
from megatron.core.dist_checkpointing.local_runs import ID_FILE, delete_outdated, delete_run, hold, let_go, run_id
from megatron.core.dist_checkpointing.local_writing import Announce, CopyWriter, PendingCopies
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint, Manifest, read_manifest
from megatron.core.dist_checkpointing.planning import Matching, assign_writes, describe_names, match, plan_reads
from megatron.core.dist_checkpointing.reading import LoadResult, fill_tensors
from megatron.core.dist_checkpointing.store_disk import disk_at
from megatron.core.exceptions import UserError
from megatron.core.utils.torch_groups import create_group


def copy_offsets(world_size: int, jump: int, factor: int) -> tuple[int, ...]:
    """Returns the distances, modulo the number of ranks, to the ranks that keep copies of a rank's state: jump, 2 jump,
    ..., so that with its own there are `factor` copies.

    Raises UserError if these are not `factor` different ranks.
    """
    offsets = tuple(jump * i % world_size for i in range(1, factor))
    if len({0, *offsets}) == factor:
        return offsets
    ranks = world_size // math.gcd(jump, world_size)
    raise UserError(
        f"steps of {jump} ranks from a rank of {world_size} reach {ranks} ranks, itself included, and {factor} copies "
        "are asked for"
    )


class UnfitCopy(UserError):
    """A local copy is not one that this run can go on from."""


@dataclass(frozen=True)
class _Copy:
    """A copy that a rank sees: whose state it is, and its iteration and folder."""

    rank: int
    iteration: int
    folder: Path


class LocalCopies:
    """The local copies of a run. All methods are collective over the group of `ranks`.

    Args:
        root: the folder of this run's copies on this host.
        ranks: the ranks of the run.
        layout: describes how the state is split over ranks; copies of another layout are not used.
        offsets: distances to the ranks that keep copies of this rank's state (`copy_offsets`).
        log: gets the same sentences on all ranks.
        disk: access to the file system.
        save: the folder of the run's checkpoints; with it, no other run deletes the copies (`local_runs`).
    """

    def __init__(
        self,
        root: Path,
        ranks: RankCoordinator,
        layout: Mapping[str, int],
        offsets: Sequence[int],
        log: Log,
        disk: Disk | None = None,
        save: Path | None = None,
    ) -> None:
        self.root, self.ranks, self.offsets, self.log, self.disk = root, ranks, offsets, log, disk or Disk()
        self.layout = {"world_size": ranks.size, **layout}
        self._writer = CopyWriter(root, ranks, offsets, self.disk)
        self._writer_of_thread: CopyWriter | None = None
        held = None if save is None else hold(root, save)
        self._release = None if held is None else weakref.finalize(self, let_go, held, os.getpid())

    # Saving ----------------------------------------------------------------------------------------------------------

    def save(
        self,
        chunks: Iterable[Chunk],
        *,
        step: int,
        common: Mapping[str, object],
        config: Mapping[str, object],
        weights_finite: bool | None = None,
    ) -> int:
        """Writes this rank's copy, sends it to the ranks that keep one, and retires older copies. Returns the bytes of
        this rank's files. `chunks` and the other values are those of `writing.save`.

        Raises UserError on all ranks if a rank cannot write; older copies then stay, and no partial files remain.
        """
        own = [replace(chunk, holders=()) for chunk in chunks]
        return self._writer.save(own, Manifest(step, {}, common, config, self.layout, weights_finite))

    def begin_save(
        self,
        chunks: Iterable[Chunk],
        memory: StagingMemory,
        *,
        step: int,
        common: Mapping[str, object],
        config: Mapping[str, object],
        weights_finite: bool | None = None,
        started: float | None = None,
        announce: Announce = lambda nbytes, seconds, paused: None,
    ) -> PendingCopies:
        """Copies this rank's chunks to `memory` and starts the thread that does the rest of `save`; the chunks may
        change as soon as this returns. The save before must be finished. `started` and `announce` are those of
        `PendingCopies`; by default it starts now."""
        started = time.monotonic() if started is None else started
        if self._writer_of_thread is None:  # the main thread goes on to communicate over its own groups
            several = self.ranks.size > 1
            assert not several or self.ranks.size == dist.get_world_size(), "every rank makes the group"
            ranks = RankCoordinator(create_group(backend="gloo")) if several else self.ranks
            self._writer_of_thread = replace(self._writer, ranks=ranks)
        writer, manifest = self._writer_of_thread, Manifest(step, {}, common, config, self.layout, weights_finite)
        own = [replace(chunk, holders=()) for chunk in chunks]
        staged = self.ranks.run_on_all(lambda: memory.copy(assign_writes(own, self.ranks.global_rank)))
        return PendingCopies(self.ranks, lambda: writer.save(staged, manifest), started, announce)

    # The end of runs -------------------------------------------------------------------------------------------------

    def close(self, delete: bool) -> None:
        """Lets go of the copies at the end of the run. With `delete`, for a complete run, the last rank of a host that
        lets go deletes them. Not collective."""
        if self._release is not None:
            self._release()
        if self._release is not None and delete:
            with contextlib.suppress(OSError):
                delete_run(self.root, self.disk)

    def delete_outdated(self, accept: Callable[[Manifest], None]) -> None:
        """Deletes the copies of other runs that no run will read again, and logs them and those that are left."""
        found = self.ranks.gather(delete_outdated(self.root, self.disk, accept))
        for sentence in sorted({sentence for sentences in found for sentence in sentences}):
            self.log(sentence)

    # Loading ---------------------------------------------------------------------------------------------------------

    def recover(self, after: int, accept: Callable[[Manifest], None]) -> tuple[Path, Manifest] | None:
        """Returns the folder and manifest of the newest copy of this rank's state, once every rank has a whole one of
        the same iteration; copies of lost ranks are sent to them. None if there is no such iteration after `after`.

        `accept` raises UserError for a copy from which the run must not go on. Reads every byte: a broken copy is
        deleted, and another one is looked for.
        """
        told: set[str] = set()
        while True:
            seen = self._inventory(accept, told)
            offers = self.ranks.gather([[copy.rank, copy.iteration] for copy in seen])
            have = defaultdict[int, set[int]](set)
            for of, iteration in (pair for pairs in offers for pair in pairs if pair[1] > after):
                have[iteration].add(of)
            everyone = set(range(self.ranks.size))
            whole = [iteration for iteration, ranks in have.items() if ranks == everyone]
            if not whole:
                for iteration, ranks in sorted(have.items(), reverse=True):
                    lost = sorted(everyone - ranks)
                    self.log(f"local copies of iteration {iteration} lack the state of ranks {lost}")
                return None
            found = self._bring(max(whole), seen, offers)
            if found is not None:
                return found

    def _inventory(self, accept: Callable[[Manifest], None], told: set[str]) -> list[_Copy]:
        """Returns the copies of this layout on this host, and logs once why others are not used."""
        copies, problems = list[_Copy](), set[str]()
        for place in sorted(self.root.glob("of_rank_*/by_rank_*")):
            for folder in folders.candidates(place):
                try:
                    manifest = read_manifest(folder.path)
                    if manifest.layout != self.layout:
                        before = ", ".join(f"{k} {v}" for k, v in manifest.layout.items() if v != self.layout.get(k))
                        raise UserError(f"local copies in {self.root} are those of another layout ({before})")
                    accept(manifest)
                    whose = int(place.parent.name.removeprefix("of_rank_"))
                    copies.append(_Copy(whose, manifest.iteration, folder.path))
                except UserError as error:
                    problems.add(str(error))
        for problem in sorted({text for texts in self.ranks.gather(sorted(problems)) for text in texts} - told):
            self.log(problem)
            told.add(problem)
        return copies

    def _bring(
        self, iteration: int, seen: Sequence[_Copy], offers: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[Path, Manifest] | None:
        """Gives every rank a whole copy of its state at an iteration. Returns None on all ranks if a copy was broken;
        it is deleted."""
        mine = {copy.rank: copy for copy in seen if copy.iteration == iteration}
        holders = defaultdict[int, list[int]](list)
        for rank, copies in enumerate(offers):
            for of in sorted({of for of, i in copies if i == iteration}):
                holders[of].append(rank)
        own = mine.get(self.ranks.rank)
        folder = None if own is None else own.folder
        for rank in range(self.ranks.size):
            if rank not in holders[rank]:  # it sees no copy of its own state
                giver = holders[rank][0]
                sent = mine[rank].folder if giver == self.ranks.rank else None
                got = self._writer.exchange(sent, rank, giver, iteration, whose=rank)
                self.log(f"the state of rank {rank} at iteration {iteration} came from rank {giver}")
                folder = got if got is not None and rank == self.ranks.rank else folder
        assert folder is not None
        try:
            broken = next(broken_tensors(open_checkpoint(folder)), None)
        except BrokenCheckpoint as error:
            broken = error
        if broken is not None:  # before other ranks look again
            folders.delete(self.disk, folder)
        reports = [text for text in self.ranks.gather(None if broken is None else str(broken)) if text is not None]
        for text in reports:
            self.log(f"a local copy is broken: {text}")
        return None if reports else (folder, read_manifest(folder))

    def load(self, folder: Path, chunks: Iterable[Chunk], accept: Callable[[Manifest], None]) -> LoadResult:
        """Loads the chunks' tensors in place from this rank's copy, which `recover` returned. Raises UnfitCopy on all
        ranks if `accept` raises UserError, or if the copy has other tensors than the run; no tensor is changed then.
        Raises another UserError if a copy cannot be read any more; tensors may then be changed."""
        checkpoint = open_checkpoint(folder)

        def plan() -> Matching:
            accept(checkpoint.manifest)
            matching = match((chunk for chunk in chunks if chunk.tensor.numel()), checkpoint.catalogue)
            if matching.missing:
                raise UserError(f"{folder} has no {describe_names(matching.missing)}")
            plan_reads(matching.sources, checkpoint.catalogue)
            return matching

        try:
            matching = self.ranks.run_on_all(plan)
        except UserError as error:
            raise UnfitCopy(str(error)) from error
        self.ranks.run_on_all(lambda: fill_tensors(checkpoint, matching))
        return LoadResult(folder, checkpoint.manifest)


def root_of_run(directory: Path, save: Path, ranks: RankCoordinator) -> Path:
    """Returns the folder of the copies of the run that saves under `save`: `directory/ID`. The ID is in a file under
    `save`, so that a run that begins anew in an empty folder does not find an older one's copies. Collective. Raises
    UserError if the file can be neither read nor written."""

    def read_or_write() -> str:
        path, disk = save / ID_FILE, disk_at(save)
        try:
            if not path.exists():
                disk.make_directory(save)
                disk.replace_file(path, os.urandom(8).hex().encode())
        except OSError as error:
            raise cannot_write(path, error) from error
        found = run_id(save)
        if found is None:
            raise UserError(
                f"{path} does not hold the ID of local copies: delete it, and older local copies are left out"
            )
        return found

    return directory / ranks.run_on_first(read_or_write)
