"""Loads the newest complete checkpoint into existing tensors, from any layout into any layout."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.checkpoint import Checkpoint, check_files, open_checkpoint, read_block
from megatron.core.dist_checkpointing.checkpoint_selection import Log, Selection, first_complete, select_folders
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.data_file import BlockReader
from megatron.core.dist_checkpointing.folders import Step
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.planning import (
    BlockRead,
    Matching,
    MismatchPolicy,
    describe_names,
    match,
    plan_reads,
    used_flags,
)
from megatron.core.exceptions import UserError

STRICT = MismatchPolicy()

_READING_THREADS = 4
"""Number of threads that read, verify and copy blocks. Reading, verifying and copying take about the same time; a
single thread reaches 1 GB/s."""
_BLOCKS_PER_THREAD = 8
"""Number of blocks per thread."""


@dataclass(frozen=True)
class LoadResult:
    """The result of a load: the folder, its manifest (with the JSON state), and the keys without a counterpart."""

    folder: Path
    manifest: Manifest
    missing: frozenset[str] = frozenset()
    """Names that this rank wanted and that the checkpoint does not contain."""
    unused: frozenset[str] = frozenset()
    """Names in the checkpoint that no rank wanted."""


def load(
    root: Path,
    chunks: Iterable[Chunk],
    *,
    step: Step | None = None,
    policy: MismatchPolicy = STRICT,
    accept: Callable[[Manifest], None] | None = None,
    renames: Callable[[Manifest], Callable[[str], str] | None] | None = None,
    group: dist.ProcessGroup | None = None,
    log: Log = print,
) -> LoadResult | None:
    """Loads the chunks' tensors in place from the newest complete checkpoint in `root`. Collective over the group.

    Returns None if there is no checkpoint. For a broken checkpoint, logs file and reason and tries the next older one;
    all ranks load the same one. `step` selects one checkpoint. Before tensors are read `accept` may raise UserError to
    refuse the checkpoint, or OutdatedCheckpoint to try the next older one. `renames` may return a function from the
    names of a checkpoint's tensors to those of the chunks. `log` gets the same sentences on all ranks.

    Raises UserError on all ranks for wanted keys that are not stored and stored keys that no rank wants (unless
    `policy` allows them), different shapes, another program's checkpoint, or if all checkpoints are broken. Some
    tensors may then have been overwritten.
    """
    ranks = RankCoordinator(group)
    choice = Selection(**ranks.run_on_first(lambda: asdict(select_folders(root, step))))
    loading = _Loading(ranks, list(chunks), policy, accept, log, renames=renames)
    return first_complete(root, choice, loading.load_from, log)


def load_folder(
    folder: Path,
    chunks: Iterable[Chunk],
    *,
    policy: MismatchPolicy,
    log: Log,
) -> LoadResult:
    """Loads the chunks' tensors in place from one checkpoint folder. Otherwise like `load`.

    Raises BrokenCheckpoint (a UserError) on all ranks if the folder contains no checkpoint, or a broken one.
    """
    loading = _Loading(RankCoordinator(), list(chunks), policy, None, log, "another value of `strict` allows them")
    return loading.load_from(folder)


@dataclass
class _Loading:
    """One load by all ranks, which tries several folders in turn."""

    ranks: RankCoordinator
    wanted: Sequence[Chunk]
    policy: MismatchPolicy
    accept: Callable[[Manifest], None] | None
    log: Log
    hint: str = "--ckpt-waive-keys allows keys by name"
    """Advice for the user about keys of one side only."""
    renames: Callable[[Manifest], Callable[[str], str] | None] | None = None
    """Returns how the chunks name the tensors of a checkpoint; None: as the checkpoint does."""
    overwritten: set[str] = field(default_factory=set)
    """Names of tensors that may contain values of a broken folder that was tried before."""

    def load_from(self, folder: Path) -> LoadResult:
        """Loads from one folder. If one rank finds a broken file, all ranks raise BrokenCheckpoint."""
        checkpoint = self._open(folder)
        if self.accept is not None:
            accept, manifest = self.accept, checkpoint.manifest
            self.ranks.run_on_all(lambda: accept(manifest))
        checkpoint = self._renamed(checkpoint)
        matching = self.ranks.run_on_all(lambda: match(self.wanted, checkpoint.catalogue))
        unused = self._unused(checkpoint, matching)
        self.ranks.run_on_all(lambda: self._check_keys(checkpoint, matching, unused))
        self._log_mismatches(matching, unused)
        self.overwritten.update(chunk.name for chunk, _ in matching.sources)
        self.ranks.run_on_all(lambda: fill_tensors(checkpoint, matching))
        return LoadResult(folder, checkpoint.manifest, frozenset(matching.missing), frozenset(unused))

    def _open(self, folder: Path) -> Checkpoint:
        """Opens the checkpoint. Rank 0 verifies everything but the tensors' bytes; the other ranks verify the JSON
        files."""
        opened: list[Checkpoint] = []

        def verify() -> None:
            opened.append(open_checkpoint(folder))
            check_files(opened[0])

        self.ranks.run_on_first(verify)
        return self.ranks.run_on_all(lambda: opened[0] if opened else open_checkpoint(folder))

    def _renamed(self, checkpoint: Checkpoint) -> Checkpoint:
        renamed = None if self.renames is None else self.renames(checkpoint.manifest)
        if renamed is None:
            return checkpoint
        return replace(checkpoint, catalogue={renamed(name): stored for name, stored in checkpoint.catalogue.items()})

    def _unused(self, checkpoint: Checkpoint, matching: Matching) -> list[str]:
        """Names in the checkpoint that no rank uses."""
        names = sorted(checkpoint.catalogue)
        used = self.ranks.any_rank(used_flags(names, matching.used)).tolist()
        return [name for name, flag in zip(names, used, strict=True) if not flag]

    def _check_keys(self, checkpoint: Checkpoint, matching: Matching, unused: Sequence[str]) -> None:
        """Raises UserError, naming the keys that are missing or unused and not allowed to be."""
        policy, problems = self.policy, []
        missing = [name for name in matching.missing if not (policy.missing or policy.allows(name))]
        extra = [name for name in unused if not (policy.unused or policy.allows(name))]
        if missing:
            problems.append(f"{len(missing)} keys of this run are not in it: {describe_names(missing)}")
        if extra:
            problems.append(f"{len(extra)} of its keys are not used by this run: {describe_names(extra)}")
        overwritten = matching.missing & self.overwritten
        if overwritten and not missing:
            problems.append(f"a broken newer checkpoint has already overwritten {describe_names(overwritten)}")
        if problems:
            raise UserError(f"{checkpoint.folder}: {'; '.join(problems)} ({self.hint})")

    def _log_mismatches(self, matching: Matching, unused: Sequence[str]) -> None:
        """Logs the conversions, missing keys and unused keys of all ranks."""
        for note in sorted({note for notes in self.ranks.gather(sorted(matching.notes)) for note in notes}):
            self.log(note)
        missing = {name for names in self.ranks.gather(sorted(matching.missing)) for name in names}
        if missing:
            self.log(f"{len(missing)} keys are not in the checkpoint and keep their values: {describe_names(missing)}")
        reported = [name for name in unused if not self.policy.is_silent(name)]
        if reported:
            self.log(f"{len(reported)} keys of the checkpoint are not used: {describe_names(reported)}")


def fill_tensors(checkpoint: Checkpoint, matching: Matching) -> None:
    """Reads and verifies the blocks that contain wanted elements, and copies these into the chunks' tensors. Raises
    BrokenCheckpoint."""
    on_device = any(chunk.tensor.is_cuda for chunk, _ in matching.sources)
    sources = [(chunk.readable(), source) for chunk, source in matching.sources]
    plan = plan_reads(sources, checkpoint.catalogue)
    threads = min(_READING_THREADS, os.cpu_count() or 1, len(plan) // _BLOCKS_PER_THREAD + 1)
    with ThreadPoolExecutor(threads) as pool:
        # Threads take every n-th block, so that together they read each file from its beginning to its end.
        done = [pool.submit(_copy_blocks, checkpoint.folder, plan[i::threads], on_device) for i in range(threads)]
    for part in done:
        part.result()
    for (chunk, _), (read, _) in zip(matching.sources, sources, strict=True):
        if read is not chunk:
            chunk.load(read.flat)


@torch.no_grad()
def _copy_blocks(folder: Path, plan: Sequence[BlockRead], on_device: bool) -> None:
    with BlockReader(pinned=on_device) as reader:
        for read in plan:
            path = folder / read.source.data_file
            values = read_block(reader, path, read.source.chunk, read.block)
            for chunk, overlap in read.copies:
                overlap.target_view(chunk.flat).copy_(overlap.source_view(values))
