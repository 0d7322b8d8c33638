"""Which run the local copies in a folder belong to, and which of them no run will read again.

Every run has a folder DIRECTORY/ID on each of its hosts. The file `run.json` in it names the folder of the run's
checkpoints. The run's processes share a lock on this file (flock) for as long as they live. A later run deletes the
copies of another one if no process has the lock, and if the checkpoints show that the copies will not be read: a
checkpoint is as new, or another run has begun in its folder. Copies of other runs are left, and named.
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.checkpoint_selection import newest_iteration
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.exceptions import UserError
from megatron.core.utils.store_path import StorePath, place

RECORD = "run.json"
ID_FILE = "local_copies_id.txt"
"""File in the folder of a run's checkpoints."""
SPARE = "spare"
"""Folder beside the copies of a rank's state: an older copy, whose memory or disk blocks the next one uses again."""
_ID = re.compile("[0-9a-f]{16}")
_PLACES = "of_rank_*/by_rank_*"


def run_id(save: Path) -> str | None:
    """Returns the ID of the local copies of the run that saves under `save`; None if there is none."""
    try:
        words = (save / ID_FILE).read_bytes().decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return words if _ID.fullmatch(words) else None


def hold(root: Path, save: Path) -> int | None:
    """Writes `root`/run.json, and takes its lock together with the run's other processes. Returns the descriptor, for
    `let_go`. None if the folder cannot be written or has no locks; no run then deletes it."""
    folder = str(save if isinstance(save, StorePath) else save.absolute())
    try:
        while True:
            root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(root / RECORD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if _is_at(descriptor, root / RECORD):  # not deleted while this process waited
                    content = json.dumps({"save": folder}).encode()
                    os.ftruncate(descriptor, os.pwrite(descriptor, content, 0))
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    except OSError:
        return None


def let_go(descriptor: int, process: int) -> None:
    """Ends what `hold` began in the process with this ID. Its children have the descriptor, but not the lock."""
    if os.getpid() == process:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that still has the descriptor would keep it
    os.close(descriptor)


def delete_run(root: Path, disk: Disk) -> bool:
    """Deletes the copies in `root` and the folder, unless a process holds it. Returns whether they are gone. Files of
    others stay, and so does the folder around them. Raises OSError."""
    with _locked(root) as descriptor:
        if descriptor is None:
            return False
        for held in root.glob(_PLACES):
            for folder in folders.list_folders(held):
                folders.delete(disk, folder.path)
            if (held / SPARE).exists():
                disk.remove_tree(held / SPARE)
        (root / RECORD).unlink()
        for directory in (*root.glob(_PLACES), *root.glob("of_rank_*"), root):
            with contextlib.suppress(OSError):
                directory.rmdir()
    return True


def delete_outdated(own: Path, disk: Disk, accept: Callable[[Manifest], None]) -> list[str]:
    """Deletes the copies of other runs beside `own` on this host that no run will read again. Returns a sentence for
    each, and for each other run whose copies are left. `accept` raises UserError for a checkpoint that is not loaded
    unless asked for."""
    said = []
    for root in sorted(path for path in own.parent.glob("*") if _ID.fullmatch(path.name) and path != own):
        with contextlib.suppress(OSError, UserError):
            nbytes = sum(path.stat().st_size for path in root.glob(f"{_PLACES}/*/*"))
            size, save = f"{nbytes / 1e6:.1f} MB of local copies", _save_of(root)
            if save is None:
                if nbytes:
                    said.append(f"{root} has {size} of another run; delete it if that run is not to go on")
                continue
            why = _why_outdated(root, save, accept)
            with _locked(root) as descriptor:
                is_used = descriptor is None
            if is_used:
                continue
            if why is None:
                said.append(f"{root} has {size} of the run that saves to {save}; delete it if that is not to go on")
            elif delete_run(root, disk):
                said.append(f"{root}: deleted {size}: {why}")
    return said


def _save_of(root: Path) -> Path | None:
    """Returns the folder of checkpoints that run.json names; None without a whole one."""
    try:
        return place(str(json.loads((root / RECORD).read_bytes())["save"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _why_outdated(root: Path, save: Path, accept: Callable[[Manifest], None]) -> str | None:
    """Returns why no run will read the copies in `root`; None if one may."""
    found = run_id(save)
    if found is None:  # the folder may be on a disk that is not mounted
        return None
    if found != root.name:
        return f"another run has begun in {save}"
    copies = [folder.iteration for held in root.glob(_PLACES) for folder in folders.list_folders(held)]
    newest = newest_iteration(save, accept)
    return f"{save} has a checkpoint as new, of iteration {newest}" if newest >= max(copies, default=0) else None


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[int | None]:
    """Holds the lock of run.json alone inside the context; gives None if there is none, or a process has it."""
    try:
        descriptor = os.open(root / RECORD, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
            return
        yield descriptor if _is_at(descriptor, root / RECORD) else None
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
