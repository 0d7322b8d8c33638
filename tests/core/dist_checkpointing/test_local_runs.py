"""Local copies of other runs in the same folder: deleted once no run will read them, otherwise left and named."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.local_copies import LocalCopies, root_of_run
from megatron.core.dist_checkpointing.local_runs import ID_FILE, RECORD, delete_run, hold, let_go
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.writing import save as save_checkpoint
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box


def chunk() -> Chunk:
    return Chunk("a", (3,), Box.whole((3,)), None, torch.ones(3))


def facts(step: int) -> dict[str, object]:
    return {"step": step, "common": {"iteration": step}, "config": {}}


def run_at(tmp_path: Path, name: str, said: list[str] | None = None) -> LocalCopies:
    ranks, save = RankCoordinator(), tmp_path / name
    root = root_of_run(tmp_path / "local", save, ranks)
    return LocalCopies(root, ranks, {}, (), (said if said is not None else []).append, save=save)


def ended(tmp_path: Path, name: str, step: int) -> Path:
    """A run that was killed after its copies of a step. Returns their folder."""
    copies = run_at(tmp_path, name)
    copies.save([chunk()], **facts(step))  # type: ignore[arg-type]
    return copies.root


def begin(tmp_path: Path, accept: object = lambda manifest: None) -> list[str]:
    """Begins a run that deletes what is outdated; returns what it says."""
    said: list[str] = []
    run_at(tmp_path, "new", said).delete_outdated(accept)  # type: ignore[arg-type]
    return said


def test_copies_of_a_run_that_began_anew_are_deleted(tmp_path: Path) -> None:
    root = ended(tmp_path, "old", 5)
    shutil.rmtree(tmp_path / "old")
    (said,) = begin(tmp_path)
    assert root.exists() and said == (
        f"{root} has 0.0 MB of local copies of the run that saves to {tmp_path}/old; delete it if that is not to go on"
    )  # the disk of its checkpoints may be missing
    root_of_run(tmp_path / "local", tmp_path / "old", RankCoordinator())
    (said,) = begin(tmp_path)
    assert not root.exists() and f": another run has begun in {tmp_path}/old" in said
    assert begin(tmp_path) == []


@pytest.mark.parametrize(("checkpoint", "stays"), [(4, True), (5, False), (6, False)])
def test_copies_stay_while_they_are_newer_than_the_checkpoints(tmp_path: Path, checkpoint: int, stays: bool) -> None:
    root = ended(tmp_path, "old", 5)
    save_checkpoint(tmp_path / "old", [chunk()], layout={}, **facts(checkpoint))  # type: ignore[arg-type]
    (said,) = begin(tmp_path)
    assert root.exists() == stays
    assert f"deleted 0.0 MB of local copies: {tmp_path}/old has a checkpoint as new, of" in said or stays


def test_a_checkpoint_that_no_run_loads_does_not_count(tmp_path: Path) -> None:
    root = ended(tmp_path, "old", 5)
    save_checkpoint(tmp_path / "old", [chunk()], layout={}, **facts(6))  # type: ignore[arg-type]

    def refuse(manifest: Manifest) -> None:
        raise UserError("its weights are not finite")

    begin(tmp_path, refuse)
    assert root.exists()


def test_copies_of_a_run_that_lives_stay(tmp_path: Path) -> None:
    """Its own process holds them, and a child that has the descriptor too does not keep them for ever."""
    alive = run_at(tmp_path, "old")
    alive.save([chunk()], **facts(5))  # type: ignore[arg-type]
    save_checkpoint(tmp_path / "old", [chunk()], layout={}, **facts(6))  # type: ignore[arg-type]
    assert begin(tmp_path) == [] and alive.root.exists()
    held = hold(alive.root, tmp_path / "old")
    assert held is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[held]) as child:
        let_go(held, os.getpid())
        root = alive.root
        del alive
        assert len(begin(tmp_path)) == 1 and not root.exists()
        child.communicate(b"\n")


def test_files_of_others_and_folders_without_a_record_stay(tmp_path: Path) -> None:
    root = ended(tmp_path, "old", 5)
    other, unknown = root / "of_rank_00000" / "notes.txt", tmp_path / "local" / f"{0:016x}"
    other.touch()
    shutil.copytree(root, unknown)
    (unknown / RECORD).unlink()
    (tmp_path / "old" / ID_FILE).write_text(f"{1:016x}")
    said = begin(tmp_path)
    assert other.exists() and [*root.glob("**/*")] == [other.parent, other]
    assert said[0] == f"{unknown} has 0.0 MB of local copies of another run; delete it if that run is not to go on"
    assert [*unknown.glob("*/*/*/*.safetensors")]


def test_a_complete_run_deletes_its_own(tmp_path: Path) -> None:
    first, second = run_at(tmp_path, "save"), run_at(tmp_path, "save")  # two ranks of a host
    first.save([chunk()], **facts(5))  # type: ignore[arg-type]
    first.close(delete=True)
    assert first.root.exists(), "the other one may still read"
    second.close(delete=True)
    assert not first.root.exists()
    assert not delete_run(first.root, Disk())


def test_copies_of_ranks_that_are_elsewhere_now_are_deleted(tmp_path: Path) -> None:
    copies = run_at(tmp_path, "save")
    left = copies.root / "of_rank_00000" / "by_rank_00003" / "iter_0000004"
    killed = left.with_name("iter_0000004.tmp-01234567")
    for folder in (left, killed):
        folder.mkdir(parents=True)
    copies.save([chunk()], **facts(5))  # type: ignore[arg-type]
    assert not left.exists() and not killed.exists()
    assert [path.name for path in copies.root.glob("*/by_rank_00000/*")] == ["iter_0000005"]


@pytest.fixture(autouse=True)
def folder_that_can_be_written(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "local").mkdir()
    yield


def test_a_folder_that_cannot_be_written_is_not_held(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert hold(tmp_path / "file" / "x", tmp_path) is None
