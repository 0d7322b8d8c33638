"""Which checkpoint of a directory to load: the newest whole one, unless someone asked for another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.checkpoint import Checkpoint, check_files, open_checkpoint
from megatron.core.dist_checkpointing.folders import Folder, Step
from megatron.core.dist_checkpointing.manifest import MANIFEST, BrokenCheckpoint
from megatron.core.exceptions import UserError

Say = Callable[[str], object]
"""Takes a sentence for the person who watches the run."""


@dataclass(frozen=True)
class Choice:
    """Names of the folders to try in turn, and what to tell about the choice."""

    folders: list[str]
    notes: list[str]


def choose(root: Path, step: Step | None = None) -> Choice:
    """The folders that may be loaded, best first; with `step`, that one. Raises UserError when it is not there.

    None when `root` has neither checkpoints nor a tracker file. UserError too when the tracker names a checkpoint and
    there is none at all, or when all there is was written by another program.
    """
    available = folders.candidates(root)
    notes: list[str] = []
    chosen = _asked_for(root, available, step) if step is not None else _by_tracker(root, available, notes)
    foreign = [folder for folder in chosen if folders.is_foreign(folder.path)]
    if foreign and len(foreign) == len(chosen):
        raise UserError(
            f"{foreign[0].path} holds another program's checkpoint (torch .pt or .distcp files, no {MANIFEST}); "
            "this program reads folders with rank_NNNNN.safetensors files and a manifest.json"
        )
    notes += [f"{folder.path.name} is left out: another program's checkpoint" for folder in foreign]
    return Choice([folder.path.name for folder in chosen if folder not in foreign], notes)


def broken_warning(folder: Path, error: BrokenCheckpoint) -> str:
    return f"WARNING: checkpoint {folder} is broken: {error}"


def none_whole(root: Path, broken: Sequence[BrokenCheckpoint]) -> UserError:
    return UserError(f"no whole checkpoint in {root}: " + "; ".join(map(str, broken)))


def find_checkpoint(root: Path, step: Step | None = None, say: Say = print) -> Checkpoint | None:
    """The checkpoint that a load would take, as far as that shows without its tensors; None when there is none.

    For one process that wants the flags or the common state alone. Raises UserError as `choose`, and when none of what
    is there is whole.
    """
    choice = choose(root, step)
    for note in choice.notes:
        say(note)
    broken = []
    for name in choice.folders:
        try:
            checkpoint = open_checkpoint(root / name)
            check_files(checkpoint)
            return checkpoint
        except BrokenCheckpoint as error:
            say(broken_warning(root / name, error))
            broken.append(error)
    if broken:
        raise none_whole(root, broken)
    return None


def _asked_for(root: Path, available: Sequence[Folder], step: Step) -> list[Folder]:
    chosen = [folder for folder in available if folder.step == step]
    if not chosen:
        there = ", ".join(str(folder.step) for folder in reversed(available)) or "none"
        raise UserError(f"{root} has no checkpoint of iteration {step}; it has: {there}")
    return chosen


def _by_tracker(root: Path, available: Sequence[Folder], notes: list[str]) -> list[Folder]:
    """All usable folders, newest first, but for those that someone went back behind by editing the tracker.

    A folder that is newer than what the tracker says was saved by a process that was killed before it wrote the
    tracker, unless the tracker was changed after that save: then a person chose an older one.
    """
    tracker_path, tracker = root / folders.TRACKER, folders.read_tracker(root)
    if tracker.problem is not None:
        notes.append(f"WARNING: {tracker.problem}: looking for the newest whole checkpoint")
    elif tracker.step is None and available:
        notes.append(f"WARNING: {tracker_path} is missing: looking for the newest whole checkpoint")
    if tracker.step is None:
        return list(available)
    if not available:
        raise UserError(f"{tracker_path} says {tracker.step}, but {root} holds no checkpoint")
    named = next((folder for folder in available if folder.step == tracker.step), None)
    if named is None:
        notes.append(f"WARNING: {tracker_path} says {tracker.step}, which is not there: looking for the newest")
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
