"""Changes on disk, each announced before it happens."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.core.dist_checkpointing.disk import Disk, cannot_write, check_room
from megatron.core.exceptions import UserError


def test_replacing_a_file_announces_every_step(tmp_path: Path) -> None:
    operations: list[str] = []
    disk = Disk(lambda operation, path: operations.append(operation))
    for content in (b"one", b"two"):
        disk.replace_file(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == content
    assert operations == 2 * ["create", "write", "sync", "rename", "sync_directory"]


@pytest.mark.parametrize("step", ["create", "write", "sync", "rename"])
def test_a_replacement_that_fails_leaves_the_former_file(tmp_path: Path, step: str) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def fail(operation: str, path: Path) -> None:
        if operation == step:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        Disk(fail).replace_file(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_files_are_created_new(tmp_path: Path) -> None:
    Disk().write_file(tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        Disk().write_file(tmp_path / "a", b"two")
    assert "a: no" in str(cannot_write(tmp_path / "a", OSError("no")))


def test_a_disk_with_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(total: int, used: int, free: int) -> None:
        found = SimpleNamespace(total=total, used=used, free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or found)

    usage(10_000_000, 8_000_000, 1_000_000)  # root may write a million bytes more
    assert check_room(tmp_path / "not/yet", 2e6) is None
    takes = f"--save {tmp_path}/not/yet: a checkpoint takes "
    warning = check_room(tmp_path / "not/yet", 2.1e6)
    assert warning is not None and warning.startswith(f"{takes}2.1 MB, and 2.0 MB are free there; free space")
    with pytest.raises(
        UserError, match=rf"^{takes}10\.1 MB, and the whole file system there has 10\.0 MB; give another"
    ):
        check_room(tmp_path / "not/yet", 1.01e7)
    assert asked == [tmp_path] * 3
    usage(0, 0, 0)  # a file system without a size
    assert check_room(tmp_path, 2e6) is None
