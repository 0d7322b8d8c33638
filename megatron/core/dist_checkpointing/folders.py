"""Folder names in a checkpoint directory, and the tracker file.

DIR/latest_checkpointed_iteration.txt     the tracker: an iteration in decimal, or `release`
DIR/iter_0000010/                         a checkpoint
DIR/iter_0000010.tmp-1a2b3c4d/            a checkpoint that is being written, or that a killed save has left
DIR/iter_0000010.replaced-1a2b3c4d/       the old iter_0000010, while the new one gets its name
DIR/iter_0000010.deleted-1a2b3c4d/        a checkpoint that is being deleted

In a store all saves of an iteration write into iter_0000010/, which counts once it has a manifest (`store_disk`).
"""

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.dist_checkpointing.store_disk import MARKED, StoreDisk
from megatron.core.exceptions import UserError
from megatron.core.utils.files import read_regular_file
from megatron.core.utils.store_path import StorePath

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE: Final = "release"
"""Folder name and tracker word of a checkpoint without an iteration, such as converted weights."""

Step = int | Literal["release"]
"""Identifies a checkpoint of a directory: an iteration, or `release`."""

_FOLDER = re.compile(r"(?:iter_(?P<iteration>\d{7,})|release)(?:\.(?P<state>tmp|replaced|deleted)-[0-9a-f]+)?")
_FOREIGN = (".pt", ".pth", ".bin", ".distcp", ".metadata")


def folder_name(step: Step) -> str:
    """Returns the folder name of a checkpoint: `iter_0000010` or `release`."""
    return f"iter_{step:07d}" if isinstance(step, int) else step


def sibling_name(folder: Path, state: Literal["tmp", "replaced", "deleted"]) -> Path:
    """Returns an unused path beside a checkpoint folder, for a folder that is being written, replaced or deleted."""
    return folder.with_name(f"{folder.name}.{state}-{os.urandom(4).hex()}")


@dataclass(frozen=True)
class Folder:
    """A folder that a save has made. `state` is None if it has its final name, otherwise `tmp`, `replaced` or
    `deleted`."""

    path: Path
    step: Step
    state: str | None

    @property
    def iteration(self) -> int:
        """The iteration; 0 for `release`."""
        return self.step if isinstance(self.step, int) else 0


def list_folders(root: Path) -> list[Folder]:
    """Returns all checkpoint folders in `root`, complete or not, in no order. Empty if `root` does not exist or is no
    folder. Raises UserError if it cannot be read."""
    found = []
    try:
        for path in root.iterdir():
            match = _FOLDER.fullmatch(path.name)
            if match and path.is_dir():
                step: Step = int(match["iteration"]) if match["iteration"] else RELEASE
                found.append(Folder(path, step, match["state"] or _state_in_store(path)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{root}: {error.strerror}") from error
    return found


def candidates(root: Path) -> list[Folder]:
    """Returns the folders that may contain a complete checkpoint, newest first.

    A replaced folder counts only if no folder has its final name, since then the save was killed between its two
    renames.
    """
    folders = list_folders(root)
    folders += _unlisted(root, folders)
    final = {folder.step for folder in folders if folder.state is None}
    usable = [f for f in folders if f.state is None or (f.state == "replaced" and f.step not in final)]
    return sorted(usable, key=lambda folder: (folder.iteration, folder.path.name), reverse=True)


def _state_in_store(folder: Path) -> str | None:
    """Returns `tmp` for a folder in a store that holds nothing but objects of unfinished saves, otherwise None."""
    if not isinstance(folder, StorePath):
        return None
    names = [path.name for path in folder.iterdir()]
    unfinished = bool(names) and all(map(MARKED.fullmatch, names))
    return "tmp" if unfinished and not (folder / MANIFEST).exists() else None  # a listing may lack the manifest


def _unlisted(root: Path, listed: list[Folder]) -> list[Folder]:
    """Returns the checkpoint that the tracker names if it is in a store whose listing does not show it yet."""
    if not isinstance(root, StorePath):
        return []
    step = read_tracker(root).step
    if step is None or any(folder.step == step and folder.state is None for folder in listed):
        return []
    path = root / folder_name(step)
    return [Folder(path, step, None)] if (path / MANIFEST).exists() else []


def is_foreign(folder: Path) -> bool:
    """Whether a folder contains another program's checkpoint: no manifest.json, but files such as *.pt or *.distcp."""
    if (folder / MANIFEST).exists():
        return False
    depth = ("*", "*/*")
    return any(path.name.endswith(_FOREIGN) for pattern in depth for path in folder.glob(pattern))


@dataclass(frozen=True)
class Tracker:
    """Contents of the tracker file: a step, or a problem with the file. Both are None if there is no file."""

    step: Step | None = None
    problem: str | None = None
    written_ns: int = 0
    """Time of the file's last change, in nanoseconds since the epoch."""


def read_tracker(root: Path) -> Tracker:
    """Reads the tracker file of a checkpoint directory. Does not raise."""
    return read_tracker_file(root / TRACKER)


def read_tracker_file(path: Path) -> Tracker:
    """Reads a tracker file. Does not raise."""
    try:
        content = read_regular_file(path, 64)
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
    return Tracker(problem=f"{path} contains {word!r}, which is not an iteration")


def write_tracker(disk: Disk, root: Path, step: Step) -> None:
    """Makes the tracker file name a checkpoint, in one step."""
    disk.replace_file(root / TRACKER, str(step).encode())


def clean(disk: Disk, root: Path) -> list[str]:
    """Removes what killed saves have left. Restores a replaced checkpoint if its successor never got its final name.

    Returns the names of the folders removed or restored. No other save into `root` may run at the same time.
    """
    touched = []
    folders = list_folders(root)
    final = {folder.step for folder in folders if folder.state is None}
    for folder in folders:
        if isinstance(disk, StoreDisk) and folder.state is not None:
            disk.remove_objects([path for path in folder.path.iterdir() if MARKED.fullmatch(path.name)])
        elif folder.state == "replaced" and folder.step not in final:
            disk.rename(folder.path, folder.path.with_name(folder_name(folder.step)))
            final.add(folder.step)
        elif folder.state is not None:
            disk.remove_tree(folder.path)
        else:
            continue
        touched.append(folder.path.name)
    for path in root.glob(f".{TRACKER}.*.tmp") if not isinstance(disk, StoreDisk) else ():
        path.unlink(missing_ok=True)
    return touched


def clean_siblings(disk: Disk, folder: Path) -> list[str]:
    """Removes the temporary folders that killed saves of a single folder have left beside it. Returns their names."""
    if isinstance(disk, StoreDisk):
        return []
    left = [path for path in folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*") if path.is_dir()]
    for path in left:
        disk.remove_tree(path)
    return [path.name for path in left]


def rename_into_place(disk: Disk, temporary: Path, folder: Path) -> None:
    """Renames a finished folder to its final name. An older checkpoint with that name is removed afterwards.

    In a store it has its name, and what is removed are the objects that its manifest does not name."""
    if isinstance(disk, StoreDisk):
        disk.discard_others(folder)
        return
    replaced = sibling_name(folder, "replaced")
    had_one = folder.exists()
    if had_one:
        disk.rename(folder, replaced)
    disk.rename(temporary, folder)
    disk.sync_directory(folder.parent)
    if had_one:
        disk.remove_tree(replaced)


def delete(disk: Disk, folder: Path) -> None:
    """Deletes a checkpoint. A reader finds either all of it or nothing."""
    if isinstance(disk, StoreDisk):
        disk.remove_tree(folder)
        return
    deleted = sibling_name(folder, "deleted")
    disk.rename(folder, deleted)
    disk.sync_directory(folder.parent)
    disk.remove_tree(deleted)
