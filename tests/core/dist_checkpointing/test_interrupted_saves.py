"""A save that is killed, or loses power, at any of its steps: the newest complete checkpoint is found and loaded.

Every step goes through `Disk`. The steps of a save are counted once; then a child process runs the save for each of
them and is killed by SIGKILL right before it, or half-way through a write. For the power cut, the parent then also
takes away what no sync had made safe: contents of files, and names.
"""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_chunk

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.async_saving import StagingMemory, begin_save
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.local_copies import LocalCopies
from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.writing import save
from megatron.core.parameters import Box


def chunks_of(value):
    return [Chunk(name, (4,), Box.whole((4,)), None, torch.full((4,), value)) for name in "ab"]


def save_values(root, step, value, keep_last=None, disk=None):
    common = {"iteration": step}
    save(root, chunks_of(value), step=step, common=common, config={}, layout={}, keep_last=keep_last, disk=disk)


def load_values(root):
    """(iteration, value of all elements, sentences)."""
    targets, said = [make_chunk(name, (4,), empty=True) for name in "ab"], []
    loaded = load(root, targets, log=said.append)
    values = {float(value) for target in targets for value in target.tensor}
    assert len(values) == 1, "elements of two checkpoints are mixed"
    return loaded.manifest.common["iteration"], values.pop(), said


def fsync_nothing(descriptor):
    pass


@pytest.fixture(autouse=True)
def fsync_put_back():
    """Recorders stand in for os.fsync; the real one would only cost time, as no test pulls a plug."""
    real = os.fsync
    os.fsync = fsync_nothing
    yield
    os.fsync = real


def moved(path, target, name):
    """A file's name after `path`, itself or a directory above it, has become `target`."""
    return re.sub(re.escape(str(path)) + r"(?=/|$)", str(target), name)


class Recorder(Disk):
    """Keeps the names of steps, and which contents and names a power cut would take away."""

    def __init__(self):
        super().__init__(self.note)
        self.steps = []
        self.unsynced_files = []
        self.unsynced_names = []
        os.fsync = self.synced  # put back by the fixture

    def note(self, operation, path):
        self.steps.append(operation)

    def synced(self, descriptor):
        """In place of os.fsync. What is synced is named by the kernel."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self.unsynced_files = [name for name in self.unsynced_files if name != path]
        self.unsynced_names = [change for change in self.unsynced_names if str(Path(change[1]).parent) != path]

    def make_directory(self, path):
        existed = path.exists()
        super().make_directory(path)
        if not existed:
            self.unsynced_names.append(["made", str(path)])

    def create(self, path):
        file = super().create(path)
        self.unsynced_names.append(["made", str(path)])
        self.unsynced_files.append(str(path))
        return file

    def create_over(self, path, size):
        existed = path.exists()
        file = super().create_over(path, size)
        if not existed:
            self.unsynced_names.append(["made", str(path)])
        self.unsynced_files.append(str(path))
        return file

    def rename(self, path, target):
        former = [target.read_text(), target.stat().st_mtime_ns] if target.is_file() else None
        super().rename(path, target)
        self.unsynced_files = [moved(path, target, name) for name in self.unsynced_files]
        for change in self.unsynced_names:
            change[1] = moved(path, target, change[1])
        self.unsynced_names.append(["named", str(target), str(path), former])


class Mortal(Recorder):
    """Kills its own process before the n-th step, or half-way through it where that is a write."""

    def __init__(self, last_step, half, testament):
        super().__init__()
        self.last_step, self.half, self.testament = last_step, half, testament

    def note(self, operation, path):
        super().note(operation, path)
        if len(self.steps) == self.last_step + 1 and not (self.half and operation == "write"):
            self.die()

    def write(self, file, content):
        super().write(file, content[: len(content) // 2] if self.half else content)
        if self.half and len(self.steps) == self.last_step + 1:
            file.flush()
            self.die()
        if self.half:
            file.write(content[len(content) // 2 :])

    def die(self):
        self.testament.write_text(json.dumps([self.unsynced_files, self.unsynced_names]))
        os.kill(os.getpid(), signal.SIGKILL)


def killed(save_again, last_step, half, testament):
    """Run `save_again(disk)` in a child that is killed at the step; the names of steps are those of a whole run."""
    child = os.fork()
    if child == 0:
        try:
            save_again(Mortal(last_step, half, testament))
        finally:
            os._exit(1)  # never reached: the child must have been killed
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status


def lose_power(testament, names_too):
    """Takes back what was not synced: contents always, names if `names_too`, as a file system may; never a removal."""
    files, names = json.loads(testament.read_text())
    for name in files:
        if Path(name).exists():
            os.truncate(name, 0)
    while names_too and names:
        operation, name, *rest = names.pop()
        path = Path(name)
        if not path.exists():
            continue
        if operation == "named":
            source, former = rest
            path.rename(source)
            names = [[kind, moved(path, source, changed), *more] for kind, changed, *more in names]
            if former is not None:
                path.write_text(former[0])
                os.utime(path, ns=(former[1], former[1]))
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def first_and_next(root, disk=None):
    """20 after 10, keeping one: the whole life of a checkpoint."""
    save_values(root, 20, 2.0, keep_last=1, disk=disk)


def same_again(root, disk=None):
    """10 again, with other values, over the only checkpoint there is."""
    save_values(root, 10, 2.0, disk=disk)


def after_a_killed_save(root, disk=None):
    """20 after 10, with the leftovers of earlier kills to clean."""
    for name in ("iter_0000020.tmp-aa", "iter_0000005.deleted-bb"):
        (root / name).mkdir(exist_ok=True)
    first_and_next(root, disk)


def in_the_background(root, disk=None):
    """20 after 10, written by a thread."""
    facts = {"step": 20, "common": {"iteration": 20}, "config": {}, "layout": {}}
    begin_save(root, chunks_of(2.0), StagingMemory(), **facts, keep_last=1, disk=disk).finish()


KILLED, CUT, NAMES_LOST = "killed", "power cut", "power cut, names lost"
IN_A_WRITE = "killed in a write"


@pytest.mark.slow_cases("same_again-killed; power cut, names lost", "after_a_killed_save-killed; power cut, names lost")
@pytest.mark.parametrize(
    ("action", "losses"),
    [
        (first_and_next, [KILLED, CUT, NAMES_LOST]),
        (first_and_next, [IN_A_WRITE]),
        (same_again, [KILLED, NAMES_LOST]),
        (after_a_killed_save, [KILLED, NAMES_LOST]),
        (in_the_background, [NAMES_LOST]),
        *(
            pytest.param(action, [loss], marks=pytest.mark.slow)
            for action in (same_again, after_a_killed_save)
            for loss in (IN_A_WRITE, CUT)
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "; ".join(value),
)
def test_every_step(tmp_path, action, losses):
    """Each loss begins with the files that one kill has left."""
    counted = tmp_path / "counted"
    save_values(counted, 10, 1.0)
    whole = Recorder()
    action(counted, whole)
    assert len(whole.steps) > 20 and not whole.unsynced_files and not whole.unsynced_names
    outcomes = {loss: set() for loss in losses}
    for last_step in range(len(whole.steps)):
        root, testament = tmp_path / f"run{last_step}", tmp_path / "testament"
        os.fsync = fsync_nothing
        save_values(root, 10, 1.0)
        killed(lambda disk, root=root: action(root, disk), last_step, IN_A_WRITE in losses, testament)
        left = shutil.copytree(root, tmp_path / f"left{last_step}")
        for loss in losses:
            shutil.rmtree(root)
            shutil.copytree(left, root)
            if loss in (CUT, NAMES_LOST):
                lose_power(testament, loss == NAMES_LOST)
            outcomes[loss].add(check_what_is_left(root, 10 if action is same_again else 20))
    assert all(found == {1.0, 2.0} for found in outcomes.values()), outcomes


def check_what_is_left(root, saved_iteration):
    """Checks that one whole checkpoint is loaded and that the next save goes through. Returns the loaded value."""
    iteration, value, said = load_values(root)
    assert (iteration, value) in {(10, 1.0), (saved_iteration, 2.0)}
    behind = (root / folders.TRACKER).read_bytes() != str(iteration).encode()
    assert len(said) == behind and all("its save was interrupted" in note for note in said), said
    # The next save cleans up and goes through.
    save_values(root, 30, 3.0, keep_last=1)
    assert load_values(root) == (30, 3.0, [])
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000030", folders.TRACKER]
    return value


ALONE = RankCoordinator(), {}, (), print


def save_copies(root, step, value, disk=None):
    """Local copies of one rank, complete on return."""
    copies = LocalCopies(root, *ALONE, disk)
    copies.save(chunks_of(value), step=step, common={"iteration": step}, config={})


def load_copies(root):
    """(iteration, value of all elements)."""
    targets, copies = [make_chunk(name, (4,), empty=True) for name in "ab"], LocalCopies(root, *ALONE)
    folder, manifest = copies.recover(0, lambda manifest: None)
    copies.load(folder, targets, lambda manifest: None)
    values = {float(value) for target in targets for value in target.tensor}
    assert len(values) == 1, "elements of two copies are mixed"
    return manifest.iteration, values.pop()


@pytest.mark.parametrize("loss", [KILLED, IN_A_WRITE, CUT, NAMES_LOST])
def test_every_step_of_a_local_copy(tmp_path, loss):
    """It is written over the copy of iteration 5, while that of 10 is the newest."""

    def with_a_spare(root):
        save_copies(root, 5, 0.5)
        save_copies(root, 10, 1.0)

    with_a_spare(tmp_path / "counted")
    whole = Recorder()
    save_copies(tmp_path / "counted", 20, 2.0, whole)
    assert len(whole.steps) > 15 and not whole.unsynced_files and not whole.unsynced_names
    found = set()
    for last_step in range(len(whole.steps)):
        root, testament = tmp_path / f"run{last_step}", tmp_path / "testament"
        os.fsync = fsync_nothing
        with_a_spare(root)
        killed(lambda disk, root=root: save_copies(root, 20, 2.0, disk), last_step, loss == IN_A_WRITE, testament)
        if loss in (CUT, NAMES_LOST):
            lose_power(testament, loss == NAMES_LOST)
        found.add(load_copies(root))
        save_copies(root, 30, 3.0)
        assert load_copies(root) == (30, 3.0)
        assert {path.name for path in root.glob("*/*/*")} <= {"iter_0000030", "spare"}
    assert found == {(10, 1.0), (20, 2.0)}


def test_a_save_killed_before_the_tracker_is_told(tmp_path):
    save_values(tmp_path, 10, 1.0)
    counted = Recorder()
    save_values(tmp_path / "counted", 20, 2.0, disk=counted)
    tracker_rename = max(i for i, step in enumerate(counted.steps) if step == "rename")
    killed(lambda disk: save_values(tmp_path, 20, 2.0, disk=disk), tracker_rename, False, tmp_path / "testament")
    assert (tmp_path / folders.TRACKER).read_bytes() == b"10"
    assert load_values(tmp_path) == (
        20,
        2.0,
        ["iter_0000020 is newer than the tracker says (10): its save was interrupted"],
    )


def test_nothing_whole_is_nothing_to_load(tmp_path):
    """Killed during the very first save: there is no checkpoint, and that is no error."""
    killed(lambda disk: save_values(tmp_path, 10, 1.0, disk=disk), 6, False, tmp_path / "testament")
    assert [path.name for path in tmp_path.glob("iter_*")] and load(tmp_path, []) is None
