"""Checkpoints in object stores: the last object makes one complete, and each fault of a store is told."""

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from support.checkpoints import make_chunk, whole_tensor
from support.processes import run_on_ranks
from support.stores import faults, store_in

from megatron.core.dist_checkpointing.async_saving import StagingMemory, begin_save
from megatron.core.dist_checkpointing.checkpoint import verify
from megatron.core.dist_checkpointing.checkpoint_selection import open_newest
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.folders import TRACKER, candidates, read_tracker
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.store_disk import StoreDisk
from megatron.core.dist_checkpointing.writing import SaveResult, save
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
from megatron.core.utils.store_path import place

SHAPE = (6, 5)


def saved(root: Path, step: int = 10, value: float = 0.0, **more: Any) -> SaveResult:
    chunk = make_chunk("w", SHAPE)
    chunk.tensor.add_(value)
    return save(root, [chunk], step=step, common={}, config={}, layout={}, **more)


def loaded(root: Path, log: Any = lambda text: None) -> tuple[int, float]:
    """Returns the iteration that a load finds, and what was added to the tensor."""
    chunk = make_chunk("w", SHAPE, empty=True)
    found = load(root, [chunk], log=log)
    assert found is not None
    (added,) = set((chunk.tensor - whole_tensor("w", SHAPE).flatten()).tolist())
    return found.manifest.iteration, added


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return place(store_in(tmp_path))


@pytest.mark.parametrize("url", ["store", "memory://checkpoints/run", "file://{}/run"])
def test_every_kind_of_store(tmp_path: Path, url: str) -> None:
    root = place(store_in(tmp_path) if url == "store" else url.format(tmp_path))
    for step in (10, 20, 30):
        result = saved(root, step, value=step, keep_last=2)
    assert result.notes == ["deleted iter_0000010 (--keep-last 2)"] and result.folder == root / "iter_0000030"
    assert loaded(root) == (30, 30.0) and read_tracker(root).step == 30
    assert [folder.iteration for folder in candidates(root)] == [30, 20]
    assert verify(root / "iter_0000020")[1] == []
    fsspec.filesystem("memory").store.clear()


def test_a_kill_before_any_change_leaves_a_checkpoint_to_load(root: Path) -> None:
    """A save that replaces a checkpoint of its own iteration is no exception."""
    saved(root, 10, 1.0)

    class Killed(BaseException):
        pass

    class Disk(StoreDisk):
        left = 0

        def discard(self, folder: Path) -> None:
            pass

    def before(operation: str, path: Path) -> None:
        Disk.left -= 1
        if Disk.left < 0:
            raise Killed

    outcomes = []
    for step in (10, 20):
        for count in range(99):
            Disk.left = count
            try:
                saved(root, step, 2.0, disk=Disk(before))
            except Killed:
                outcomes.append(loaded(root))
                continue
            break
        assert loaded(root) == (step, 2.0)
    assert (10, 1.0) in outcomes and (10, 2.0) in outcomes and (20, 2.0) in outcomes and len(outcomes) > 10
    notes = saved(root, 30).notes
    assert not any("iter" in note for note in notes)
    assert all(len(names(folder.path)) == 3 for folder in candidates(root))


def test_what_a_killed_save_left_is_removed_and_nothing_else(root: Path, tmp_path: Path) -> None:
    saved(root, 10)
    local = tmp_path / "store/run"
    for name in ("iter_0000020/rank_00000-0a1b2c3d.safetensors", "iter_0000030/mp_rank_00/model_optim_rng.pt"):
        (local / name).parent.mkdir(parents=True)
        (local / name).write_bytes(b"x")
    assert [folder.iteration for folder in candidates(root)] == [30, 10]
    assert saved(root, 40).notes == ["removed or restored what an interrupted save has left: iter_0000020"]
    assert (local / "iter_0000030/mp_rank_00/model_optim_rng.pt").exists() and not names(local / "iter_0000020")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"broken_link": ".safetensors"},
            r"rank_00000-\w{8}.safetensors: the store does not answer as ex",
        ),
        ({"broken_link": MANIFEST}, r"manifest.json: the store does not answer as expected \(ConnectionResetError"),
        ({"cut": ".safetensors"}, r"rank_00000-\w{8}.safetensors: the store has \d+ of \d+ bytes of it"),
        ({"expired": True}, r"the store refuses access \(The provided token has expired\); renew the credentials"),
    ],
)
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_save_that_fails_changes_nothing(root: Path, fault: dict[str, Any], message: str, in_thread: bool) -> None:
    saved(root, 10, 1.0)
    before = names(root / "iter_0000010")
    for step in (10, 20):
        with faults(str(root), **fault), pytest.raises(UserError, match=message):
            if in_thread:
                facts: dict[str, Any] = {"common": {}, "config": {}, "layout": {}}
                begin_save(root, [make_chunk("w", SHAPE)], StagingMemory(), step=step, **facts).finish()
            else:
                saved(root, step, 2.0)
        assert loaded(root) == (10, 1.0) and names(root / "iter_0000010") == before
        assert [folder.iteration for folder in candidates(root)] == [10]
    saved(root, 20, 2.0)
    assert loaded(root) == (20, 2.0)


def test_a_load_tells_expired_credentials_and_takes_no_older_checkpoint(root: Path) -> None:
    saved(root, 10)
    saved(root, 20)
    with faults(str(root), expired=True), pytest.raises(UserError, match=r"refuses access .*; renew the credentials"):
        loaded(root)


def test_a_listing_that_lags_behind_hides_no_checkpoint(root: Path) -> None:
    saved(root, 10, 1.0)
    saved(root, 20, 2.0)
    with faults(str(root), unlisted=["iter_0000020"]):
        assert loaded(root) == (20, 2.0)
        saved(root, 30, 3.0, keep_last=2)
    assert [folder.iteration for folder in candidates(root)] == [30, 20, 10]
    with faults(str(root), unlisted=[MANIFEST]):
        assert saved(root, 40, 4.0).notes == []
    assert loaded(root) == (40, 4.0)
    assert [folder.iteration for folder in candidates(root)] == [40, 30, 20, 10]


def test_a_partial_object_is_broken_and_an_older_checkpoint_is_taken(root: Path, tmp_path: Path) -> None:
    saved(root, 10, 1.0)
    saved(root, 20, 2.0)
    (data,) = (tmp_path / "store/run/iter_0000020").glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-8])
    told: list[str] = []
    assert loaded(root, told.append) == (10, 1.0)
    assert "iter_0000020 is broken" in told[0] and "bytes, its index says" in told[0]


def test_an_outdated_tracker_is_as_on_disk(root: Path) -> None:
    saved(root, 10)
    (root / TRACKER).unlink()
    told: list[str] = []
    assert loaded(root, told.append)[0] == 10 and "is missing: looking for the newest" in told[0]


def save_on_rank(url: str, in_thread: bool) -> str:
    """Saves half of the rows of a tensor. Returns what went wrong."""
    rank = torch.distributed.get_rank()
    box = Box((3 * rank, 0), (3, 5))
    chunks: list[Chunk] = [make_chunk("w", SHAPE, box)]
    facts: dict[str, Any] = {"step": 10, "common": {}, "config": {}, "layout": {}}
    try:
        if in_thread:
            begin_save(place(url), chunks, StagingMemory(), **facts).finish()
        else:
            save(place(url), chunks, **facts)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("in_thread", [False, True])
def test_ranks_save_together_and_another_layout_loads(root: Path, in_thread: bool) -> None:
    with faults(str(root), broken_link="rank_00001"):
        told = run_on_ranks(save_on_rank, 2, str(root), in_thread)
    assert all("rank_00001-" in text and "this checkpoint is not written" in text for text in told)
    assert candidates(root) == []
    assert run_on_ranks(save_on_rank, 2, str(root), in_thread) == ["", ""]
    assert loaded(root) == (10, 0.0) and len(open_newest(root).indexes) == 2
