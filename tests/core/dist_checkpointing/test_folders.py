"""Folder names of a checkpoint directory, and the tracker file."""

from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.disk import Disk


def test_names() -> None:
    assert folders.folder_name(10) == "iter_0000010" and folders.folder_name("release") == "release"
    sibling = folders.sibling_name(Path("a/iter_0000010"), "tmp")
    assert sibling.parent == Path("a") and sibling.name.startswith("iter_0000010.tmp-")


def test_candidates_are_newest_first_and_replaced_folders_count_only_without_a_successor(tmp_path: Path) -> None:
    for name in ("iter_0000010", "iter_0000020.replaced-aa", "iter_0000010.replaced-bb", "iter_0000030.tmp-cc", "x"):
        (tmp_path / name).mkdir()
    assert [folder.path.name for folder in folders.candidates(tmp_path)] == ["iter_0000020.replaced-aa", "iter_0000010"]
    assert folders.candidates(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("content", "step"), [(b"20\n", 20), (b" 0000020 ", 20), (b"release", "release"), (b"-1", None), (b"\xff", None)]
)
def test_the_tracker(tmp_path: Path, content: bytes, step: int | str | None) -> None:
    assert folders.read_tracker(tmp_path) == folders.Tracker()
    (tmp_path / folders.TRACKER).write_bytes(content)
    tracker = folders.read_tracker(tmp_path)
    assert tracker.step == step and (tracker.problem is None) == (step is not None)
    folders.write_tracker(Disk(), tmp_path, 7)
    assert folders.read_tracker(tmp_path).step == 7
