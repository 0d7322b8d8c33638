"""Saving and loading by real processes: other numbers of ranks, and failures of one that all must share."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import chunks_of_rank, filled, make_chunk
from support.processes import run_on_ranks

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint
from megatron.core.dist_checkpointing.planning import MismatchPolicy
from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.writing import save
from megatron.core.exceptions import UserError


def save_on_rank(root, step, disk=None, value=None):
    chunks = chunks_of_rank()
    if value is not None:
        for chunk in chunks:
            chunk.tensor.fill_(value)
    return save(Path(root), chunks, step=step, common={"iteration": step}, config={}, layout={}, disk=disk)


def save_ok(root):
    saved = save_on_rank(root, 10)
    return saved.nbytes, sorted(path.name for path in saved.folder.iterdir())


def load_ok(root):
    chunks, said = chunks_of_rank(empty=True), []
    loaded = load(Path(root), chunks, log=said.append)
    assert loaded.manifest.common == {"iteration": 10} and not said
    return all(torch.equal(chunk.tensor.view(torch.uint8), filled(chunk).view(torch.uint8)) for chunk in chunks)


@pytest.mark.parametrize("read_by", [1, 2, 4])
def test_saved_by_two_and_loaded_by_one_two_and_four(tmp_path, read_by):
    first, second = run_on_ranks(save_ok, 2, str(tmp_path))
    assert first == second
    expected = ["manifest.json", *(f"rank_0000{r}.{kind}" for r in range(2) for kind in ("json", "safetensors"))]
    assert first[1] == expected and (tmp_path / TRACKER).read_bytes() == b"10"
    assert run_on_ranks(load_ok, read_by, str(tmp_path)) == [True] * read_by


# ---------------------------------------------------------------------------------------------------------------------
# One rank's trouble is everybody's


class FullOnRankOne(Disk):
    def create(self, path):
        if dist.get_rank() == 1 and path.suffix == ".safetensors":
            return open("/dev/full", "wb", buffering=0)
        return super().create(path)


def save_on_a_full_disk(root):
    save_on_rank(root, 10)
    try:
        save_on_rank(root, 20, FullOnRankOne())
    except UserError as error:
        return str(error), load_ok(root)


def test_when_one_rank_cannot_write_all_say_so_and_nothing_stays(tmp_path):
    answers = run_on_ranks(save_on_a_full_disk, 2, str(tmp_path))
    for rank, (message, loads) in enumerate(answers):
        assert "rank_00001.safetensors: No space left on device" in message and loads
        assert ("rank 1 on " in message) == (rank == 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", TRACKER]


class KilledOnRankOne(Disk):
    def __init__(self):
        super().__init__()
        self.writes = 0

    def write(self, file, content):
        self.writes += 1
        if dist.get_rank() == 1 and self.writes == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(file, content)


def save_and_die(root):
    save_on_rank(root, 20, KilledOnRankOne())


def test_when_one_rank_is_killed_the_older_checkpoint_stands(tmp_path):
    run_on_ranks(save_ok, 2, str(tmp_path))
    with pytest.raises(AssertionError, match="rank 1: ended without an answer, exit code -9"):
        run_on_ranks(save_and_die, 2, str(tmp_path))
    assert run_on_ranks(load_ok, 2, str(tmp_path)) == [True, True]


def save_two(root):
    save_on_rank(root, 10)
    save_on_rank(root, 20, value=7)


def load_and_tell(root):
    chunks, said = chunks_of_rank(empty=True), []
    loaded = load(Path(root), chunks, log=said.append)
    whole = all(torch.equal(chunk.tensor, filled(chunk)) for chunk in chunks)
    return loaded.manifest.iteration, whole, said


def test_bytes_that_only_one_rank_reads_turn_all_to_the_older_checkpoint(tmp_path):
    """A bit of rank 1's part of a moment: its checksum is seen while tensors are read, on rank 1 alone."""
    run_on_ranks(save_two, 2, str(tmp_path))
    path = tmp_path / "iter_0000020" / "rank_00001.safetensors"
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header + 40] ^= 4  # the widest type lies first: the moments
    path.write_bytes(content)
    answers = run_on_ranks(load_and_tell, 2, str(tmp_path))
    assert [answer[:2] for answer in answers] == [(10, True)] * 2
    for rank, (_, _, said) in enumerate(answers):
        assert len(said) == 1 and str(path) in said[0] and "do not match their checksum" in said[0]
        assert ("rank 1 on " in said[0]) == (rank == 0)


def keys_that_differ(root):
    """Each rank holds a tensor of its own, as pipeline stages do; on loading, rank 1 wants one too many."""
    rank = dist.get_rank()
    options = {"step": 10, "common": {}, "config": {}, "layout": {}}
    save(Path(root), [make_chunk(f"stage{rank}", (3,))], **options)
    target = make_chunk(f"stage{rank}", (3,), empty=True)
    load(Path(root), [target])
    assert torch.equal(target.tensor, filled(target))
    messages = []
    for wanted, policy in (
        ([target, *([make_chunk("extra", (1,))] if rank else [])], MismatchPolicy()),
        ([] if rank else [target], MismatchPolicy()),
    ):
        try:
            load(Path(root), wanted, policy=policy)
            messages.append("none")
        except UserError as error:
            messages.append(str(error))
    return messages


def test_missing_and_unused_keys_are_judged_over_all_ranks(tmp_path):
    for missing, unused in run_on_ranks(keys_that_differ, 2, str(tmp_path)):
        assert "1 keys of this run are not in it: extra" in missing
        assert "1 of its keys are not used by this run: stage1" in unused


def disagree(root):
    try:
        save(Path(root), [], step=10, common={"iteration": 10 + dist.get_rank()}, config={}, layout={})
    except UserError as error:
        return str(error)


def test_ranks_that_are_at_different_iterations_do_not_save(tmp_path):
    answers = run_on_ranks(disagree, 2, str(tmp_path))
    assert answers == ["the state to be saved at iteration 10 differs between rank 0 and ranks [1]"] * 2


def kinds_of_failure(broken_rank, other_rank):
    """One rank finds a broken file while another has a reason to stop for good."""

    def action():
        if dist.get_rank() == broken_rank:
            raise BrokenCheckpoint("file", "reason")
        if dist.get_rank() == other_rank:
            raise UserError("stop")

    try:
        RankCoordinator().run_on_all(action)
    except UserError as error:
        return type(error).__name__


@pytest.mark.parametrize(("other", "kind"), [(1, "UserError"), (3, "BrokenCheckpoint")])
def test_all_ranks_take_the_same_kind_of_error(other, kind):
    assert run_on_ranks(kinds_of_failure, 2, 0, other) == [kind] * 2
