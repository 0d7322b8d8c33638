"""Saves in the background: the copied values are written, training may go on, and all ranks learn of a failure."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make_chunk
from support.processes import run_on_ranks
from torch import Tensor

from megatron.core.dist_checkpointing.async_saving import PendingSave, StagingMemory, begin_save
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.folders import TRACKER, read_tracker
from megatron.core.dist_checkpointing.reading import load
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box


def start(root: Path, tensor: Tensor, step: int = 10, **more: Any) -> PendingSave:
    chunk = Chunk("w", tuple(tensor.shape), Box.whole(tuple(tensor.shape)), None, tensor)
    facts = {"step": step, "common": {"iteration": step}, "config": {}, "layout": {}}
    return begin_save(root, [chunk], more.pop("memory", StagingMemory()), **facts, **more)


def loaded(root: Path, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[int, Tensor]:
    chunk = make_chunk("w", shape, dtype=dtype, empty=True)
    found = load(root, [chunk], log=lambda text: None)
    assert found is not None
    return found.manifest.iteration, chunk.tensor


def waits_for(event: threading.Event) -> Disk:
    """A disk whose first change waits, so that a test can act while the thread is at work."""
    return Disk(lambda operation, path: None if operation == "make_directory" else _wait(event))


def _wait(event: threading.Event) -> None:
    assert event.wait(240.0)


def test_values_may_change_while_they_are_written(tmp_path: Path) -> None:
    go_on, announced = threading.Event(), []
    tensor = torch.arange(1000.0)
    pending = start(tmp_path, tensor, disk=waits_for(go_on), announce=announced.append)
    tensor.zero_()
    assert not announced and not (tmp_path / TRACKER).exists()
    go_on.set()
    pending.finish()
    iteration, found = loaded(tmp_path, (1000,))
    assert iteration == 10 and torch.equal(found, torch.arange(1000.0))
    (saved,) = announced
    assert (saved.folder, read_tracker(tmp_path).step) == (tmp_path / "iter_0000010", 10) and saved.nbytes >= 4000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_memory_is_kept_between_saves(tmp_path: Path, dtype: torch.dtype) -> None:
    memory = StagingMemory()
    for step, size in ((10, 33), (20, 7), (30, 100)):
        tensor = torch.randint(0, 100, (size,)).to(dtype)
        start(tmp_path, tensor, step, memory=memory).finish()
        iteration, found = loaded(tmp_path, (size,), dtype)
        assert iteration == step and torch.equal(found, tensor)


def save_on_ranks(root: str, fails: int | None) -> str:
    rank = torch.distributed.get_rank()

    def fail(operation: str, path: Path) -> None:
        if rank == fails and operation == "write":
            raise OSError(28, "No space left on device", str(path))

    half = torch.full((4,), float(rank + 1))
    chunk = Chunk("w", (8,), Box((4 * rank,), (4,)), None, half)
    facts = {"step": 20, "common": {}, "config": {}, "layout": {}}
    pending = begin_save(Path(root), [chunk], StagingMemory(), **facts, disk=Disk(fail))
    half.zero_()
    try:
        pending.finish()
    except UserError as error:
        return str(error)
    return "saved"


def test_ranks_write_their_parts(tmp_path: Path) -> None:
    assert run_on_ranks(save_on_ranks, 2, str(tmp_path), None) == ["saved"] * 2
    assert loaded(tmp_path, (8,))[1].tolist() == [1.0] * 4 + [2.0] * 4


@pytest.mark.parametrize("fails", [0, 1])
def test_if_one_rank_fails_all_learn_it(tmp_path: Path, fails: int) -> None:
    """Nothing is left of the checkpoint, and the one before stays."""
    start(tmp_path, torch.arange(8.0)).finish()
    for text in run_on_ranks(save_on_ranks, 2, str(tmp_path), fails):
        assert "No space left on device; this checkpoint is not written" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", TRACKER]
    assert loaded(tmp_path, (8,))[0] == 10


def test_a_run_that_fails_waits_a_moment(tmp_path: Path) -> None:
    pending = start(tmp_path, torch.arange(8.0))
    pending.wait(240.0)
    assert loaded(tmp_path, (8,))[0] == 10
