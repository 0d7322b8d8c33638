"""Names under a checkpoint directory: iterations, the tracker file, and what is being written, replaced or deleted.

DIR/latest_checkpointed_iteration.txt     the tracker: an iteration in decimal, or `release`
DIR/iter_0000010/                         a checkpoint
DIR/iter_0000010.tmp-1a2b3c4d/            one being written, or left by a save that was killed
DIR/iter_0000010.replaced-1a2b3c4d/       the former iter_0000010, while the new one takes its name
DIR/iter_0000010.deleted-1a2b3c4d/        one being deleted
"""

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.manifest import MANIFEST

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE: Final = "release"
"""Folder and tracker word of a checkpoint that belongs to no iteration, such as converted weights."""

Step = int | Literal["release"]
"""What a checkpoint is called: an iteration, or `release`."""

_FOLDER = re.compile(r"(?:iter_(?P<iteration>\d{7,})|release)(?:\.(?P<state>tmp|replaced|deleted)-[0-9a-f]+)?")
_FOREIGN = (".pt", ".pth", ".bin", ".distcp", ".metadata")


def folder_name(step: Step) -> str:
    return f"iter_{step:07d}" if isinstance(step, int) else step


def beside(folder: Path, state: Literal["tmp", "replaced", "deleted"]) -> Path:
    """A fresh sibling name of a checkpoint folder, for what is not (or no longer) that checkpoint."""
    return folder.with_name(f"{folder.name}.{state}-{os.urandom(4).hex()}")


@dataclass(frozen=True)
class Folder:
    """A directory that a save made. `state` is None for one under its final name."""

    path: Path
    step: Step
    state: str | None

    @property
    def iteration(self) -> int:
        return self.step if isinstance(self.step, int) else 0


def list_folders(root: Path) -> list[Folder]:
    """All directories of checkpoints, whole or not, in no order; none when `root` does not exist."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            step: Step = int(match["iteration"]) if match["iteration"] else RELEASE
            found.append(Folder(path, step, match["state"]))
    return found


def candidates(root: Path) -> list[Folder]:
    """Folders that may hold a checkpoint, newest first.

    A replaced one counts only while nothing has its final name: the save was killed between its two renames.
    """
    folders = list_folders(root)
    final = {folder.step for folder in folders if folder.state is None}
    usable = [f for f in folders if f.state is None or (f.state == "replaced" and f.step not in final)]
    return sorted(usable, key=lambda folder: (folder.iteration, folder.path.name), reverse=True)


def is_foreign(folder: Path) -> bool:
    """Whether a folder holds another program's checkpoint: no manifest of ours, but files of theirs."""
    if (folder / MANIFEST).exists():
        return False
    depth = ("*", "*/*")
    return any(path.name.endswith(_FOREIGN) for pattern in depth for path in folder.glob(pattern))


@dataclass(frozen=True)
class Tracker:
    """What the tracker file says: a step, or a problem with it; both None when there is no file."""

    step: Step | None = None
    problem: str | None = None
    written_ns: int = 0
    """Time of its last change, in nanoseconds since the epoch."""


def read_tracker(root: Path) -> Tracker:
    path = root / TRACKER
    try:
        content = path.read_bytes()[:64]
        written = path.stat().st_mtime_ns
    except FileNotFoundError:
        return Tracker()
    except OSError as error:
        return Tracker(problem=f"{path}: {error.strerror}")
    word = content.decode("ascii", errors="replace").strip()
    if word == RELEASE:
        return Tracker(RELEASE, written_ns=written)
    if re.fullmatch(r"\d{1,18}", word):
        return Tracker(int(word), written_ns=written)
    return Tracker(problem=f"{path} holds {word!r}, which is no iteration")


def write_tracker(disk: Disk, root: Path, step: Step) -> None:
    disk.replace_file(root / TRACKER, str(step).encode())


def clean(disk: Disk, root: Path) -> list[str]:
    """Remove what killed saves left, and put back a replaced checkpoint whose successor never got its name.

    Returns the names of what was removed or put back. Call it only when no other save into `root` is under way.
    """
    touched = []
    folders = list_folders(root)
    final = {folder.step for folder in folders if folder.state is None}
    for folder in folders:
        if folder.state == "replaced" and folder.step not in final:
            disk.rename(folder.path, folder.path.with_name(folder_name(folder.step)))
            final.add(folder.step)
        elif folder.state is not None:
            disk.remove_tree(folder.path)
        else:
            continue
        touched.append(folder.path.name)
    for path in root.glob(f".{TRACKER}.*.tmp"):
        path.unlink(missing_ok=True)
    return touched


def clean_beside(disk: Disk, folder: Path) -> list[str]:
    """Remove what killed saves of a folder by itself left beside it; returns the names."""
    left = [path for path in folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*") if path.is_dir()]
    for path in left:
        disk.remove_tree(path)
    return [path.name for path in left]


def put_in_place(disk: Disk, aside: Path, folder: Path) -> None:
    """Give a finished folder its final name; a checkpoint that had that name is removed afterwards."""
    replaced = beside(folder, "replaced")
    had_one = folder.exists()
    if had_one:
        disk.rename(folder, replaced)
    disk.rename(aside, folder)
    disk.sync_directory(folder.parent)
    if had_one:
        disk.remove_tree(replaced)


def delete(disk: Disk, folder: Path) -> None:
    """Remove a checkpoint so that a reader finds all of it or nothing."""
    doomed = beside(folder, "deleted")
    disk.rename(folder, doomed)
    disk.sync_directory(folder.parent)
    disk.remove_tree(doomed)
