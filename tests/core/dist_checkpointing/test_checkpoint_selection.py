"""Which folders a load tries: by the tracker, by request, and what the user is told."""

import os
from pathlib import Path

import pytest
from support.checkpoints import make_chunk, save_as

from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint, open_newest, select_folders
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.exceptions import UserError

OLD, NEW = "iter_0000010", "iter_0000020"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (10, 20):
        save_as(tmp_path, [[make_chunk("a", (4,))]], step)
    return tmp_path


def date(path: Path, other: Path, seconds: int) -> None:
    """Sets the time of a file relative to another file's."""
    time = other.stat().st_mtime_ns + seconds * 10**9
    os.utime(path, ns=(time, time))


def test_newest_first_without_a_word(root: Path) -> None:
    (root / TRACKER).write_text("20")
    selection = select_folders(root)
    assert selection.folders == [NEW, OLD] and selection.notes == []


def test_an_empty_directory_selects_nothing(tmp_path: Path) -> None:
    assert select_folders(tmp_path).folders == [] == select_folders(tmp_path / "missing").folders
    assert find_checkpoint(tmp_path) is None
    with pytest.raises(UserError, match=f"^--load {tmp_path} holds no checkpoint$"):
        open_newest(tmp_path)
    with pytest.raises(UserError, match=f"^--load {tmp_path}/missing: no such folder$"):
        open_newest(tmp_path / "missing")


def test_a_tracker_that_was_set_back_leaves_newer_folders_out(root: Path) -> None:
    (root / TRACKER).write_text("10")
    date(root / TRACKER, root / NEW / MANIFEST, 1)
    selection = select_folders(root)
    assert selection.folders == [OLD] and "set back to 10" in selection.notes[0]


def test_a_save_that_was_interrupted_before_the_tracker_counts(root: Path) -> None:
    (root / TRACKER).write_text("10")
    date(root / TRACKER, root / NEW / MANIFEST, -1)
    selection = select_folders(root)
    assert selection.folders == [NEW, OLD] and "its save was interrupted" in selection.notes[0]


@pytest.mark.parametrize(
    ("tracker", "note"), [(None, "is missing"), ("777", "which does not exist"), ("x", "which is not an iteration")]
)
def test_a_tracker_without_use_is_told(root: Path, tracker: str | None, note: str) -> None:
    (root / TRACKER).unlink(missing_ok=True)
    if tracker is not None:
        (root / TRACKER).write_text(tracker)
    selection = select_folders(root)
    assert selection.folders == [NEW, OLD] and note in selection.notes[0]


def test_a_tracker_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("20")
    with pytest.raises(UserError, match=r"says 20, but .* contains no checkpoint"):
        select_folders(tmp_path)


def test_a_requested_iteration_is_the_only_one(root: Path) -> None:
    assert select_folders(root, 10).folders == [OLD]
    with pytest.raises(UserError, match="has no checkpoint of iteration 15; it has: 10, 20"):
        select_folders(root, 15)


def test_another_programs_checkpoints_are_left_out_or_refused(root: Path, tmp_path_factory) -> None:
    foreign = root / "iter_0000030"
    foreign.mkdir()
    (foreign / "common.pt").touch()
    (root / TRACKER).write_text("30")
    selection = select_folders(root)
    assert selection.folders == [NEW, OLD] and "another program's checkpoint" in selection.notes[-1]
    alone = tmp_path_factory.mktemp("alone")
    foreign.rename(alone / foreign.name)
    with pytest.raises(UserError, match="another program's checkpoint"):
        select_folders(alone)


def test_the_newest_unbroken_checkpoint_is_found(root: Path) -> None:
    (root / TRACKER).write_text("20")
    (root / NEW / "rank_00000.safetensors").unlink()
    said: list[str] = []
    checkpoint = find_checkpoint(root, log=said.append)
    assert checkpoint is not None and checkpoint.folder.name == OLD
    assert len(said) == 1 and said[0].startswith("WARNING") and NEW in said[0]
    (root / OLD / MANIFEST).write_text("{")
    with pytest.raises(UserError, match=f"no complete checkpoint in .*{NEW}.*{OLD}"):
        find_checkpoint(root, log=said.append)
