"""The writer of local copies, on one rank: what it reuses, what it retires, and what its thread reports."""

from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.local_writing import CopyWriter, PendingCopies
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box


def save(root: Path, step: int) -> int:
    chunk = Chunk("a", (3,), Box.whole((3,)), None, torch.full((3,), float(step)))
    return CopyWriter(root, RankCoordinator(), (), Disk()).save([chunk], Manifest(step, {}, {}, {}, {"world_size": 1}))


def test_one_older_copy_becomes_the_spare(tmp_path: Path) -> None:
    save(tmp_path, 1)
    place = tmp_path / "of_rank_00000" / "by_rank_00000"
    number = (place / "iter_0000001" / "rank_00000.safetensors").stat().st_ino
    save(tmp_path, 2)
    assert {path.name for path in place.iterdir()} == {"iter_0000002", "spare"}
    (place / "spare" / "other").touch()  # what the next copy does not write over is deleted
    nbytes = save(tmp_path, 3)
    files = [*(place / "iter_0000003").iterdir()]
    assert nbytes == sum(path.stat().st_size for path in files) and "other" not in {path.name for path in files}
    assert (place / "iter_0000003" / "rank_00000.safetensors").stat().st_ino == number


def test_the_thread_reports_times_and_failures() -> None:
    ranks, told = RankCoordinator(), list[tuple[int, float, float]]()
    pending = PendingCopies(ranks, lambda: 7, 0.0, lambda *values: told.append(values))
    pending.finish()
    ((nbytes, seconds, paused),) = told
    assert nbytes == 7 and seconds >= paused > 0

    def full() -> int:
        raise UserError("no space")

    failing = PendingCopies(ranks, full, 0.0, lambda *values: told.append(values))
    failing.wait(60)
    with pytest.raises(UserError, match="no space"):
        failing.finish()
    assert len(told) == 1
