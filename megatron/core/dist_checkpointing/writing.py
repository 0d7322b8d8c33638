"""Saving: every rank writes its share aside, rank 0 ties the files together and gives the whole its name.

The order that makes a kill at any point harmless: data and indexes, synced; the manifest, synced; the folder, synced;
its final name, synced; the tracker file. Nothing is removed before the new checkpoint is whole and has its name.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.checkpoint import check_files, open_checkpoint
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.disk import Disk, cannot_write
from megatron.core.dist_checkpointing.folders import Step
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST,
    BrokenCheckpoint,
    FileDigest,
    Manifest,
    RankIndex,
    index_name,
    read_bytes,
)
from megatron.core.dist_checkpointing.planning import check_complete, make_catalogue, share_out
from megatron.core.dist_checkpointing.rank_file import write_rank
from megatron.core.dist_checkpointing.ranks import Ranks
from megatron.core.exceptions import UserError


@dataclass(frozen=True)
class Saved:
    """What a save did. The same on every rank."""

    folder: Path
    nbytes: int
    """Size of the data files of all ranks."""
    seconds: float
    notes: Sequence[str]
    """What was cleaned up or deleted, one sentence each."""


def save(
    root: Path,
    chunks: Iterable[Chunk],
    *,
    step: Step,
    common: Mapping[str, Any],
    config: Mapping[str, Any],
    layout: Mapping[str, Any],
    keep_last: int | None = None,
    group: dist.ProcessGroup | None = None,
    disk: Disk | None = None,
) -> Saved:
    """Write a checkpoint `root/iter_NNNNNNN` (or `root/release`); every rank of the group calls it with its chunks.

    `common`, `config` and `layout` are JSON objects; `common` must be equal on all ranks. With `keep_last`, older
    checkpoints than that many whole ones (this one included) are deleted afterwards. Returns on every rank once the
    checkpoint is whole on disk and the tracker names it. Raises UserError on every rank when any rank fails (disk
    full, no permission): what was there before is then untouched, and nothing half-written stays.
    """
    ranks, disk, started = Ranks(group), disk or Disk(), time.monotonic()
    _check_agreement(ranks, step, common)
    begun = ranks.from_first(lambda: _begin(disk, root, step))
    contents = _Contents(ranks.size, common, config, layout)
    done = _write_aside(
        ranks, disk, root / begun["aside"], chunks, lambda aside: _publish(disk, aside, step, contents, keep_last)
    )
    notes = [*begun["notes"], *done["notes"]]
    return Saved(root / folders.folder_name(step), done["nbytes"], time.monotonic() - started, notes)


def save_folder(
    folder: Path,
    chunks: Iterable[Chunk],
    *,
    common: Mapping[str, Any],
    layout: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    disk: Disk | None = None,
) -> Saved:
    """Write a checkpoint that is a folder by itself, of no iteration and without a tracker; otherwise as `save`.

    The folder is made, and must not hold anything. `common` is taken from the first rank, unchecked.
    """
    ranks, disk, started = Ranks(group), disk or Disk(), time.monotonic()
    begun = ranks.from_first(lambda: _begin_folder(disk, folder))
    contents = _Contents(ranks.size, common, {}, layout)
    done = _write_aside(
        ranks,
        disk,
        folder.parent / begun["aside"],
        chunks,
        lambda aside: _publish_folder(disk, aside, folder, contents),
    )
    return Saved(folder, done["nbytes"], time.monotonic() - started, begun["notes"])


def save_streamed(
    root: Path,
    files: Iterable[Sequence[Chunk]],
    values_of: Callable[[Chunk], Tensor],
    *,
    step: Step,
    common: Mapping[str, Any],
    config: Mapping[str, Any],
    disk: Disk | None = None,
) -> Saved:
    """Write a checkpoint of tensors that need not be in memory, from this process alone; otherwise as `save`.

    Of each chunk's tensor only the type counts (it may be on the meta device): `values_of` gives the elements, as one
    dimension, when it is their turn, and they are forgotten once written. Each list of chunks becomes a file.
    """
    disk, started = disk or Disk(), time.monotonic()
    begun = _begin(disk, root, step)
    aside, count = root / begun["aside"], 0
    try:
        for count, chunks in enumerate(files, 1):
            write_rank(disk, aside, count - 1, chunks, values_of)
        done = _publish(disk, aside, step, _Contents(count, common, config, {}), None)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Saved(root / folders.folder_name(step), done["nbytes"], time.monotonic() - started, begun["notes"])


def _write_aside(
    ranks: Ranks, disk: Disk, aside: Path, chunks: Iterable[Chunk], publish: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Every rank's share, then what rank 0 does to make it a checkpoint. After a failure nothing is left."""
    try:
        mine = share_out(chunks, ranks.global_rank)
        ranks.together(lambda: write_rank(disk, aside, ranks.rank, mine))
        return ranks.from_first(lambda: publish(aside))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _check_agreement(ranks: Ranks, step: Step, common: Mapping[str, Any]) -> None:
    text = ranks.together(lambda: json.dumps([step, common], sort_keys=True))
    digests = ranks.gather(hashlib.sha256(text.encode()).hexdigest())
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise UserError(f"the state to be saved at iteration {step} differs between rank 0 and ranks {differing}")


def _begin(disk: Disk, root: Path, step: Step) -> dict[str, Any]:
    """Clean up after killed saves and make the folder to write into."""
    try:
        disk.make_directory(root)
        touched = folders.clean(disk, root)
        aside = folders.beside(root / folders.folder_name(step), "tmp")
        disk.make_directory(aside)
    except OSError as error:
        raise cannot_write(root, error) from error
    notes = [f"removed or put back what an interrupted save left: {', '.join(touched)}"] if touched else []
    return {"aside": aside.name, "notes": notes}


def _begin_folder(disk: Disk, folder: Path) -> dict[str, Any]:
    """The same for a folder by itself."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} holds something already; save into a folder that is empty or not there yet")
    try:
        disk.make_directory(folder.parent)
        touched = folders.clean_beside(disk, folder)
        aside = folders.beside(folder, "tmp")
        disk.make_directory(aside)
    except OSError as error:
        raise cannot_write(folder, error) from error
    notes = [f"removed what an interrupted save left: {', '.join(touched)}"] if touched else []
    return {"aside": aside.name, "notes": notes}


@dataclass(frozen=True)
class _Contents:
    """What the manifest says beside the files."""

    world_size: int
    common: Mapping[str, Any]
    config: Mapping[str, Any]
    layout: Mapping[str, Any]


def _publish(disk: Disk, aside: Path, step: Step, contents: _Contents, keep_last: int | None) -> dict[str, Any]:
    """Tie the ranks' files together, check that they are complete, and give the folder its name."""
    root, folder = aside.parent, aside.parent / folders.folder_name(step)
    nbytes = _tie(disk, aside, folder, step if isinstance(step, int) else 0, contents)
    try:
        folders.put_in_place(disk, aside, folder)
        folders.write_tracker(disk, root, step)
    except OSError as error:
        raise cannot_write(folder, error) from error
    notes = [] if keep_last is None else keep_newest(disk, root, folder, keep_last)
    return {"nbytes": nbytes, "notes": notes}


def _publish_folder(disk: Disk, aside: Path, folder: Path, contents: _Contents) -> dict[str, Any]:
    """The same for a folder by itself."""
    nbytes = _tie(disk, aside, folder, 0, contents)
    try:
        disk.rename(aside, folder)  # also onto a folder that is empty
        disk.sync_directory(folder.parent)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return {"nbytes": nbytes}


def _tie(disk: Disk, aside: Path, folder: Path, iteration: int, contents: _Contents) -> int:
    """Check that the ranks' files are complete and write the manifest; returns their bytes."""
    indexes, digests = [], {}
    for rank in range(contents.world_size):
        path = aside / index_name(rank)
        try:
            content = read_bytes(path)
        except BrokenCheckpoint as error:
            raise UserError(
                f"{error}: rank {rank} wrote it, rank 0 cannot see it; is {folder.parent} shared storage?"
            ) from None
        indexes.append(RankIndex.from_bytes(content, path))
        digests[path.name] = FileDigest.of(content)
    check_complete(make_catalogue(indexes))
    layout = {"world_size": contents.world_size, **contents.layout}
    manifest = Manifest(iteration, digests, contents.common, contents.config, layout)
    try:
        disk.write_file(aside / MANIFEST, manifest.to_bytes())
        disk.sync_directory(aside)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return sum(index.data_size for index in indexes)


def keep_newest(disk: Disk, root: Path, current: Path, count: int) -> list[str]:
    """Delete checkpoints of `root` that are older than the `count` newest whole ones up to `current`.

    `current` is the checkpoint that was just saved and is the first to be kept. Folders of later iterations (of a run
    that was rolled back), `release`, and folders without a manifest of this format are left alone.
    Returns what was done.
    """
    ours = [f.path for f in folders.candidates(root) if isinstance(f.step, int) and (f.path / MANIFEST).exists()]
    whole, notes = 1, []
    for path in ours[ours.index(current) + 1 :] if current in ours else ():
        if whole < count:
            whole += _is_whole(path)
            continue
        try:
            folders.delete(disk, path)
            notes.append(f"deleted {path.name} (--keep-last {count})")
        except OSError as error:
            notes.append(f"could not delete {path} (--keep-last {count}): {error.strerror}")
    return notes


def _is_whole(folder: Path) -> bool:
    try:
        check_files(open_checkpoint(folder))
    except UserError:
        return False
    return True
