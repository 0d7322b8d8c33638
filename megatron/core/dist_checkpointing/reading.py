"""Loading: the newest whole checkpoint into live tensors, whatever layout wrote it and whatever layout reads it."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.checkpoint import Checkpoint, check_files, open_checkpoint, read_block
from megatron.core.dist_checkpointing.choosing import Choice, Say, broken_warning, choose, none_whole
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.data_file import BlockReader
from megatron.core.dist_checkpointing.folders import Step
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint, Manifest
from megatron.core.dist_checkpointing.planning import (
    Fill,
    Matching,
    Tolerance,
    describe_names,
    match,
    plan_reads,
    used_flags,
)
from megatron.core.dist_checkpointing.ranks import Ranks
from megatron.core.exceptions import UserError

STRICT = Tolerance()

_READING_THREADS = 4
"""Reading, verifying and copying a block each take about as long; one core would do 1 GB/s of all three."""
_BLOCKS_FOR_A_THREAD = 8


@dataclass(frozen=True)
class Loaded:
    """Where the values came from, the JSON state that was saved beside them, and what was tolerated."""

    folder: Path
    manifest: Manifest
    missing: frozenset[str] = frozenset()
    """Names that this rank wanted and the checkpoint has not."""
    unused: frozenset[str] = frozenset()
    """Stored names that no rank wanted."""


def load(
    root: Path,
    chunks: Iterable[Chunk],
    *,
    step: Step | None = None,
    tolerance: Tolerance = STRICT,
    accept: Callable[[Manifest], None] | None = None,
    group: dist.ProcessGroup | None = None,
    say: Say = print,
) -> Loaded | None:
    """Fill the chunks' tensors in place from the newest whole checkpoint under `root`; all ranks of the group call it.

    None when there is no checkpoint. A broken one is told (file and reason) and the next older whole one is taken; all
    ranks take the same. With `step`, that one or an error. `accept` may refuse by UserError before tensors are read.
    `say` gets the same sentences on every rank.

    Raises UserError on every rank: wanted keys that are not stored, stored keys that no rank wants (both unless
    tolerated), shapes that differ, another program's checkpoint, no whole one left. Tensors may then be half read.
    """
    ranks = Ranks(group)
    choice = Choice(**ranks.from_first(lambda: asdict(choose(root, step))))
    for note in choice.notes:
        say(note)
    loading = _Loading(ranks, list(chunks), tolerance, accept, say)
    broken: list[BrokenCheckpoint] = []
    for name in choice.folders:
        try:
            return loading.load_from(root / name)
        except BrokenCheckpoint as error:
            say(broken_warning(root / name, error))
            broken.append(error)
    if broken:
        raise none_whole(root, broken)
    return None


def load_folder(
    folder: Path,
    chunks: Iterable[Chunk],
    *,
    tolerance: Tolerance = STRICT,
    group: dist.ProcessGroup | None = None,
    say: Say = print,
) -> Loaded:
    """Fill the chunks' tensors from one checkpoint folder; otherwise as `load`.

    Raises UserError on every rank also where there is none, or a broken one (BrokenCheckpoint, naming the file).
    """
    loading = _Loading(Ranks(group), list(chunks), tolerance, None, say, "another `strict` tolerates them")
    return loading.load_from(folder)


@dataclass
class _Loading:
    """One load: what is wanted, by these ranks together, over the folders that are tried in turn."""

    ranks: Ranks
    wanted: Sequence[Chunk]
    tolerance: Tolerance
    accept: Callable[[Manifest], None] | None
    say: Say
    way_out: str = "--ckpt-waive-keys waives keys by name"
    """What to do about keys of one side only, for people."""
    overwritten: set[str] = field(default_factory=set)
    """Names of tensors that an earlier, broken folder may have written into."""

    def load_from(self, folder: Path) -> Loaded:
        """Raises BrokenCheckpoint on all ranks when any rank finds a file broken."""
        checkpoint = self._open(folder)
        if self.accept is not None:
            accept, manifest = self.accept, checkpoint.manifest
            self.ranks.together(lambda: accept(manifest))
        matching = self.ranks.together(lambda: match(self.wanted, checkpoint.catalogue))
        unused = self._unused(checkpoint, matching)
        self.ranks.together(lambda: self._judge(checkpoint, matching, unused))
        self._tell(matching, unused)
        self.overwritten.update(chunk.name for chunk, _ in matching.sources)
        self.ranks.together(lambda: fill_tensors(checkpoint, matching))
        return Loaded(folder, checkpoint.manifest, frozenset(matching.missing), frozenset(unused))

    def _open(self, folder: Path) -> Checkpoint:
        """Rank 0 verifies everything but the tensors' bytes; then the others read and verify the JSON themselves."""
        opened: list[Checkpoint] = []

        def verify() -> None:
            opened.append(open_checkpoint(folder))
            check_files(opened[0])

        self.ranks.from_first(verify)
        return self.ranks.together(lambda: opened[0] if opened else open_checkpoint(folder))

    def _unused(self, checkpoint: Checkpoint, matching: Matching) -> list[str]:
        """Stored names that no rank uses."""
        names = sorted(checkpoint.catalogue)
        used = self.ranks.any_of(used_flags(names, matching.used)).tolist()
        return [name for name, flag in zip(names, used, strict=True) if not flag]

    def _judge(self, checkpoint: Checkpoint, matching: Matching, unused: Sequence[str]) -> None:
        """Raises UserError naming the keys that are missing or unused and not tolerated."""
        tolerance, problems = self.tolerance, []
        missing = [name for name in matching.missing if not (tolerance.missing or tolerance.allows(name))]
        extra = [name for name in unused if not (tolerance.unused or tolerance.allows(name))]
        if missing:
            problems.append(f"{len(missing)} keys of this run are not in it: {describe_names(missing)}")
        if extra:
            problems.append(f"{len(extra)} of its keys are not used by this run: {describe_names(extra)}")
        spoilt = matching.missing & self.overwritten
        if spoilt and not missing:
            problems.append(f"a broken newer checkpoint has already overwritten {describe_names(spoilt)}")
        if problems:
            raise UserError(f"{checkpoint.folder}: {'; '.join(problems)} ({self.way_out})")

    def _tell(self, matching: Matching, unused: Sequence[str]) -> None:
        """Say what was tolerated or converted on any rank."""
        for note in sorted({note for notes in self.ranks.gather(sorted(matching.notes)) for note in notes}):
            self.say(note)
        missing = {name for names in self.ranks.gather(sorted(matching.missing)) for name in names}
        if missing:
            self.say(f"{len(missing)} keys are not in the checkpoint and keep their values: {describe_names(missing)}")
        strange = [name for name in unused if not self.tolerance.leaves(name)]
        if strange:
            self.say(f"{len(strange)} keys of the checkpoint are not used: {describe_names(strange)}")


def fill_tensors(checkpoint: Checkpoint, matching: Matching) -> None:
    """Read, verify and copy every block that holds wanted elements. Raises BrokenCheckpoint."""
    on_device = any(chunk.tensor.is_cuda for chunk, _ in matching.sources)
    plan = plan_reads(matching.sources, checkpoint.catalogue)
    threads = min(_READING_THREADS, os.cpu_count() or 1, len(plan) // _BLOCKS_FOR_A_THREAD + 1)
    with ThreadPoolExecutor(threads) as pool:
        # Side by side through the files, so that together they read forward.
        done = [pool.submit(_fill, checkpoint.folder, plan[i::threads], on_device) for i in range(threads)]
    for part in done:
        part.result()


@torch.no_grad()
def _fill(folder: Path, plan: Sequence[Fill], on_device: bool) -> None:
    with BlockReader(pinned=on_device) as reader:
        for fill in plan:
            path = folder / fill.source.data_file
            values = read_block(reader, path, fill.source.chunk, fill.block)
            for chunk, overlap in fill.copies:
                overlap.target_view(chunk.flat).copy_(overlap.source_view(values))
