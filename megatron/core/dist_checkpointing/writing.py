"""Saves a checkpoint: all ranks write their parts into a temporary folder, rank 0 writes the manifest and renames it.

A kill at any point is harmless, because of the order: data files and indexes, synced; the manifest, synced; the folder,
synced; its final name, synced; the tracker file. Nothing is removed before the new checkpoint has its final name.
In a store the files get their final names at once, with a mark that is new in each save (`store_disk`).
"""

import hashlib
import json
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
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.disk import Disk, cannot_point, cannot_write
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
from megatron.core.dist_checkpointing.planning import assign_writes, check_complete, make_catalogue
from megatron.core.dist_checkpointing.rank_file import write_rank
from megatron.core.dist_checkpointing.store_disk import disk_at
from megatron.core.exceptions import UserError


@dataclass(frozen=True)
class SaveResult:
    """The result of a save, equal on all ranks."""

    folder: Path
    nbytes: int
    """Bytes of the data files of all ranks."""
    seconds: float
    notes: Sequence[str]
    """Sentences about folders that were removed, restored or deleted."""


def save(
    root: Path,
    chunks: Iterable[Chunk],
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
) -> SaveResult:
    """Writes a checkpoint `root/iter_NNNNNNN` (or `root/release`). Collective: each rank passes its own chunks.

    `common`, `config` and `layout` are JSON objects; `common` must be equal on all ranks. `weights_finite` says whether
    the weights of all ranks are finite, if it is known. With `keep_last`, all checkpoints older than the newest
    `keep_last` complete ones (including this one) are deleted afterwards; with `keep_every`, those whose iteration is a
    multiple of it stay, and `keep_last` is 1 by default. If the weights of all these are known not to be finite, the
    newest one with others stays, too. Returns once the
    checkpoint is complete on disk and the tracker file names it. If one rank fails (disk full, no permission), all
    ranks raise UserError, earlier checkpoints stay as they were, and no partial files remain.
    """
    ranks, disk, started = RankCoordinator(group), disk or disk_at(root), time.monotonic()
    temporary, notes = begin(ranks, disk, root, step, common)
    contents = Contents(ranks.size, common, config, layout, weights_finite)
    publish = publisher(disk, step, contents, keep_last, keep_every)
    done = _write_and_publish(ranks, disk, temporary, chunks, publish)
    seconds = time.monotonic() - started
    return SaveResult(root / folders.folder_name(step), done["nbytes"], seconds, [*notes, *done["notes"]])


def begin(
    ranks: RankCoordinator, disk: Disk, root: Path, step: Step, common: Mapping[str, Any]
) -> tuple[Path, list[str]]:
    """Returns the new temporary folder of a save, and sentences about remains of earlier saves. Raises UserError on all
    ranks if the ranks' state differs. Collective."""
    _check_agreement(ranks, step, common)
    begun = ranks.run_on_first(lambda: _create_temporary(disk, root / folders.folder_name(step)))
    disk.mark = begun["mark"]
    return root / begun["temporary"], begun["notes"]


def publisher(
    disk: Disk, step: Step, contents: "Contents", keep_last: int | None, keep_every: int | None = None
) -> Callable[[Path], dict[str, object]]:
    """Returns the function that completes the temporary folder of a save, for rank 0."""
    return lambda temporary: _publish(disk, temporary, step, contents, keep_last, keep_every)


def save_folder(
    folder: Path,
    chunks: Iterable[Chunk],
    *,
    common: Mapping[str, object],
    layout: Mapping[str, Any],
) -> SaveResult:
    """Writes a checkpoint into a single folder, without iteration and tracker file. Otherwise like `save`.

    The folder must be empty or not exist. `common` is taken from the first rank and not compared.
    """
    ranks, disk, started = RankCoordinator(), disk_at(folder), time.monotonic()
    begun = ranks.run_on_first(lambda: _create_temporary(disk, folder, is_alone=True))
    disk.mark = begun["mark"]
    contents = Contents(ranks.size, common, {}, layout)
    done = _write_and_publish(
        ranks,
        disk,
        folder.parent / begun["temporary"],
        chunks,
        lambda temporary: {"nbytes": _complete(disk, temporary, folder, 0, contents)},
    )
    return SaveResult(folder, done["nbytes"], time.monotonic() - started, begun["notes"])


def save_streamed(
    root: Path,
    files: Iterable[Sequence[Chunk]],
    values_of: Callable[[Chunk], Tensor],
    *,
    step: Step,
    common: Mapping[str, Any],
    config: Mapping[str, Any],
) -> SaveResult:
    """Writes a checkpoint of tensors that are not in memory, from this process alone. Otherwise like `save`.

    Each list of chunks becomes one data file. The chunks' tensors give only the type and may be on the meta device.
    `values_of` returns the elements of a chunk, one-dimensional, when they are written; they are freed afterwards.
    """
    disk, started = disk_at(root), time.monotonic()
    begun = _create_temporary(disk, root / folders.folder_name(step))
    temporary, count = root / begun["temporary"], 0
    try:
        for count, chunks in enumerate(files, 1):
            write_rank(disk, temporary, count - 1, chunks, values_of)
        done = _publish(disk, temporary, step, Contents(count, common, config, {}), None)
    except BaseException:
        disk.discard(temporary)
        raise
    return SaveResult(root / folders.folder_name(step), done["nbytes"], time.monotonic() - started, begun["notes"])


def _write_and_publish(
    ranks: RankCoordinator,
    disk: Disk,
    temporary: Path,
    chunks: Iterable[Chunk],
    publish: Callable[[Path], dict[str, object]],
) -> dict[str, Any]:
    """Writes the parts of all ranks, then publishes them on rank 0. After a failure the temporary folder is removed."""
    try:
        mine = assign_writes(chunks, ranks.global_rank)
        ranks.run_on_all(lambda: write_rank(disk, temporary, ranks.rank, mine))
        return ranks.run_on_first(lambda: publish(temporary))
    except BaseException:
        if ranks.rank == 0:
            disk.discard(temporary)
        raise


def _check_agreement(ranks: RankCoordinator, step: Step, common: Mapping[str, object]) -> None:
    text = ranks.run_on_all(lambda: json.dumps([step, common], sort_keys=True))
    digests = ranks.gather(hashlib.sha256(text.encode()).hexdigest())
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise UserError(f"the state to be saved at iteration {step} differs between rank 0 and ranks {differing}")


def _create_temporary(disk: Disk, folder: Path, is_alone: bool = False) -> dict[str, Any]:
    """Cleans up after killed saves and creates the temporary folder of a checkpoint of a run, or of one that is alone
    in its folder."""
    if is_alone and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; save into a folder that is empty or does not exist")
    try:
        disk.make_directory(folder.parent)
        touched = folders.clean_siblings(disk, folder) if is_alone else folders.clean(disk, folder.parent)
        temporary = disk.new_folder(folder)
    except OSError as error:
        raise cannot_write(folder if is_alone else folder.parent, error) from error
    notes = [f"removed or restored what an interrupted save has left: {', '.join(touched)}"] if touched else []
    return {"temporary": temporary.name, "mark": disk.mark, "notes": notes}


@dataclass(frozen=True)
class Contents:
    """The contents of the manifest, except for the indexes."""

    world_size: int
    common: Mapping[str, Any]
    config: Mapping[str, Any]
    layout: Mapping[str, object]
    weights_finite: bool | None = None


def _publish(
    disk: Disk,
    temporary: Path,
    step: Step,
    contents: Contents,
    keep_last: int | None,
    keep_every: int | None = None,
) -> dict[str, Any]:
    """Writes the manifest, renames the folder, updates the tracker file and deletes old checkpoints."""
    root, folder = temporary.parent, temporary.parent / folders.folder_name(step)
    nbytes = _complete(disk, temporary, folder, step if isinstance(step, int) else 0, contents)
    try:
        folders.write_tracker(disk, root, step)
    except OSError as error:
        raise cannot_point(root / folders.TRACKER, folder, error) from error
    keep = keep_last if keep_every is None else keep_last or 1
    notes = [] if keep is None else keep_newest(disk, root, folder, keep, keep_every)
    return {"nbytes": nbytes, "notes": notes}


def _complete(disk: Disk, temporary: Path, folder: Path, iteration: int, contents: Contents) -> int:
    """Checks that the ranks' files contain all tensors, writes the manifest and renames the folder. Returns the bytes
    of the data files."""
    indexes, digests = [], {}
    for rank in range(contents.world_size):
        path = temporary / index_name(rank, disk.mark)
        try:
            content = read_bytes(path)
        except BrokenCheckpoint as error:
            second = f"a second run that writes into {folder.parent} may have removed it (its lease.json names the run)"
            shared = "" if rank == 0 else f"; or is {folder.parent} no storage that all hosts share?"
            raise UserError(f"{error}: rank {rank} wrote it, and rank 0 does not see it: {second}{shared}") from None
        indexes.append(RankIndex.from_bytes(content, path))
        digests[path.name] = FileDigest.of(content)
    check_complete(make_catalogue(indexes))
    layout = {"world_size": contents.world_size, **contents.layout}
    manifest = Manifest(iteration, digests, contents.common, contents.config, layout, contents.weights_finite)
    try:
        disk.write_file(temporary / MANIFEST, manifest.to_bytes())
        disk.sync_directory(temporary)
        folders.rename_into_place(disk, temporary, folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return sum(index.data_size for index in indexes)


def keep_newest(disk: Disk, root: Path, current: Path, count: int, every: int | None = None) -> list[str]:
    """Deletes the checkpoints in `root` that are older than the newest `count` complete ones (including `current`),
    except those whose iteration is a multiple of `every`. If the weights of all that stay are known not to be finite,
    the newest complete one with other weights stays, too.

    `current` is the checkpoint that was just saved. Folders of later iterations (after a run was set back), `release`,
    and folders without a manifest are kept. Returns sentences about the folders that were deleted or kept.
    """
    found = [f for f in folders.candidates(root) if isinstance(f.step, int) and (f.path / MANIFEST).exists()]
    ours = [f.path for f in found]
    has_finite, complete, notes = _has_finite_weights(_complete_manifest(current)), 1, []
    flags = f"--keep-last {count}" if every is None else f"--save-retain-interval {every}"
    for folder in found[ours.index(current) + 1 :] if current in ours else ():
        path = folder.path
        stays = complete < count or (every is not None and folder.iteration % every == 0)
        if complete < count or not has_finite:
            manifest = _complete_manifest(path)
            complete += manifest is not None
            if not has_finite and _has_finite_weights(manifest):
                has_finite = True
                notes += [] if stays else [f"kept {path.name}: weights of newer checkpoints are not finite"]
                stays = True
        if stays:
            continue
        try:
            folders.delete(disk, path)
            notes.append(f"deleted {path.name} ({flags})")
        except OSError as error:
            notes.append(f"could not delete {path} ({flags}): {error.strerror}")
    return notes


def _complete_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest of a complete checkpoint; None if a file is broken or missing."""
    try:
        checkpoint = open_checkpoint(folder)
        check_files(checkpoint)
    except UserError:
        return None
    return checkpoint.manifest


def _has_finite_weights(manifest: Manifest | None) -> bool:
    """Whether nothing says that a weight is not finite. Older releases did not look."""
    return manifest is not None and manifest.weights_finite is not False
