"""Selects the checkpoint of a directory to load: the newest complete one, or the requested one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.checkpoint import Checkpoint, check_files, open_checkpoint
from megatron.core.dist_checkpointing.folders import Folder, Step
from megatron.core.dist_checkpointing.manifest import MANIFEST, BrokenCheckpoint, Manifest, OutdatedCheckpoint
from megatron.core.exceptions import UserError

T = TypeVar("T")
Log = Callable[[str], object]
"""A function that receives sentences for the user, such as `print`."""


@dataclass(frozen=True)
class Selection:
    """The folders that a load tries."""

    folders: list[str]
    """Folder names, in the order in which they are tried."""
    notes: list[str]
    """Sentences for the user that explain the selection."""


def select_folders(root: Path, step: Step | None = None) -> Selection:
    """Returns the folders that may be loaded, newest first; with `step`, only that checkpoint's.

    The selection is empty if `root` contains neither checkpoints nor a tracker file. Raises UserError if the requested
    checkpoint does not exist, if there is a tracker file and no checkpoint, or if another program wrote all
    checkpoints.
    """
    available = folders.candidates(root)
    notes: list[str] = []
    chosen = _requested(root, available, step) if step is not None else _by_tracker(root, available, notes)
    foreign = [folder for folder in chosen if folders.is_foreign(folder.path)]
    if foreign and len(foreign) == len(chosen):
        raise UserError(
            f"{foreign[0].path} is another program's checkpoint (torch .pt or .distcp files, no {MANIFEST}); "
            "this program reads folders with rank_NNNNN.safetensors files and a manifest.json, which "
            "tools/checkpoint/convert.py import-megatron makes from Megatron-LM's"
        )
    notes += [f"{folder.path.name} is left out: another program's checkpoint" for folder in foreign]
    return Selection([folder.path.name for folder in chosen if folder not in foreign], notes)


def first_complete(root: Path, selection: Selection, use: Callable[[Path], T], log: Log) -> T | None:
    """Returns `use` of the first selected folder for which it does not raise BrokenCheckpoint; None if nothing is
    selected. Logs why folders are left out. Raises UserError if all are broken or outdated."""
    for note in selection.notes:
        log(note)
    broken: list[BrokenCheckpoint] = []
    for name in selection.folders:
        try:
            return use(root / name)
        except BrokenCheckpoint as error:
            log(_warning(root / name, error))
            broken.append(error)
    if not broken:
        return None
    reasons = "; ".join(map(str, broken))
    if all(isinstance(error, OutdatedCheckpoint) for error in broken):
        raise UserError(f"no checkpoint in {root} to continue from: {reasons}")
    raise UserError(f"no complete checkpoint in {root}: {reasons}")


def _warning(folder: Path, error: BrokenCheckpoint) -> str:
    if isinstance(error, OutdatedCheckpoint):
        return f"checkpoint {folder} is left out: {error.reason}"
    return f"WARNING: checkpoint {folder} is broken: {error}"


def find_checkpoint(
    root: Path, step: Step | None = None, log: Log = print, accept: Callable[[Manifest], None] = lambda manifest: None
) -> Checkpoint | None:
    """Opens the checkpoint that a load would select, without verifying the bytes of its tensors. None if there is none.

    For a single process that needs only the flags or the common state. `accept` raises OutdatedCheckpoint for a
    checkpoint to leave out. Raises UserError as `select_folders` does, and if all checkpoints are broken.
    """

    def opened(folder: Path) -> Checkpoint:
        checkpoint = open_checkpoint(folder)
        check_files(checkpoint)
        accept(checkpoint.manifest)
        return checkpoint

    return first_complete(root, select_folders(root, step), opened, log)


def open_newest(root: Path, step: Step | None = None, log: Log = print) -> Checkpoint:
    """Returns what `find_checkpoint` returns. Raises UserError that names --load if there is none."""
    checkpoint = find_checkpoint(root, step, log)
    if checkpoint is None:
        raise nothing_to_load(root)
    return checkpoint


def nothing_to_load(root: Path) -> UserError:
    """Returns the error of a tool whose --load names a folder without checkpoints."""
    return UserError(f"--load {root} holds no checkpoint" if root.exists() else f"--load {root}: no such folder")


def newest_iteration(root: Path, accept: Callable[[Manifest], None] = lambda manifest: None) -> int:
    """Returns the iteration of the newest complete checkpoint in `root` that `accept` does not refuse; -1 if there is
    none."""
    try:
        found = find_checkpoint(root, log=lambda _: None, accept=accept)
    except UserError:
        return -1
    return -1 if found is None else found.manifest.iteration


def _requested(root: Path, available: Sequence[Folder], step: Step) -> list[Folder]:
    chosen = [folder for folder in available if folder.step == step]
    if not chosen:
        there = ", ".join(str(folder.step) for folder in reversed(available)) or "none"
        raise UserError(f"{root} has no checkpoint of iteration {step}; it has: {there}")
    return chosen


def _by_tracker(root: Path, available: Sequence[Folder], notes: list[str]) -> list[Folder]:
    """Returns all usable folders, newest first. If a user has set the tracker back, newer folders are left out.

    A folder can be newer than the tracker's iteration for two reasons: the save was killed before it wrote the tracker,
    or the user edited the tracker after the save. The times of the files tell these cases apart.
    """
    tracker_path, tracker = root / folders.TRACKER, folders.read_tracker(root)
    if tracker.problem is not None and not available:
        raise UserError(f"{tracker.problem}, and {root} contains no checkpoint")
    if tracker.problem is not None:
        notes.append(f"WARNING: {tracker.problem}: looking for the newest complete checkpoint")
    elif tracker.step is None and available:
        notes.append(f"WARNING: {tracker_path} is missing: looking for the newest complete checkpoint")
    if tracker.step is None:
        return list(available)
    if not available:
        raise UserError(f"{tracker_path} says {tracker.step}, but {root} contains no checkpoint")
    named = next((folder for folder in available if folder.step == tracker.step), None)
    if named is None:
        notes.append(f"WARNING: {tracker_path} says {tracker.step}, which does not exist: looking for the newest")
        return list(available)
    chosen = []
    for folder in available:
        if folder.iteration <= named.iteration:
            chosen.append(folder)
        elif _written_ns(folder) >= tracker.written_ns:
            chosen.append(folder)
            notes.append(
                f"{folder.path.name} is newer than the tracker says ({tracker.step}): its save was interrupted"
            )
        else:
            notes.append(
                f"{folder.path.name} is left out: the tracker was set back to {tracker.step} after it was saved"
            )
    return chosen


def _written_ns(folder: Folder) -> int:
    try:
        return (folder.path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0
