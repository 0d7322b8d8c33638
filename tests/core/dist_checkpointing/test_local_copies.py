"""Local copies: four ranks on two hosts, of which hosts, files and bytes are lost."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import chunks_of_rank
from support.pool import Pool
from support.processes import run_on_ranks

from megatron.core.dist_checkpointing import file_pieces
from megatron.core.dist_checkpointing.async_saving import StagingMemory
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.file_pieces import FileReceiver
from megatron.core.dist_checkpointing.local_copies import LocalCopies, copy_offsets, root_of_run
from megatron.core.dist_checkpointing.manifest import Manifest, OutdatedCheckpoint
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

RANKS = 4


def root_of_host(base: str) -> Path:
    """Ranks 0 and 1 are on one host, 2 and 3 on the other."""
    return Path(base) / f"host{dist.get_rank() // 2}"


def copies_of(base: str, said: list[str], jump: int = 2, tp: int = 1, disk: Disk | None = None) -> LocalCopies:
    file_pieces.PIECE_BYTES = 700  # the files take several pieces, and end within one
    offsets = copy_offsets(RANKS, jump, 2)
    return LocalCopies(root_of_host(base), RankCoordinator(), {"tp": tp}, offsets, said.append, disk)


def value_of(step: int) -> int:
    return step + 10 * dist.get_rank()


def write(copies: LocalCopies, step: int, in_background: bool = False) -> None:
    chunks = chunks_of_rank()
    for chunk in chunks:
        chunk.tensor.fill_(value_of(step))
    common, config = {"iteration": step}, {"a": 1}
    if not in_background:
        copies.save(chunks, step=step, common=common, config=config)
        return
    pending = copies.begin_save(chunks, StagingMemory(), step=step, common=common, config=config)
    for chunk in chunks:
        chunk.tensor.fill_(-1)  # training goes on
    pending.finish()


def save_steps(base: str, *steps: int, in_background: bool = False) -> list[str]:
    for step in steps:
        write(copies_of(base, []), step, in_background)
    return sorted(str(path.relative_to(base)) for path in root_of_host(base).glob("*/*/iter_*"))


def save_in_background(base: str, *steps: int) -> list[str]:
    return save_steps(base, *steps, in_background=True)


def accept(manifest: Manifest) -> None:
    assert manifest.common["iteration"] == manifest.iteration


def recover(base: str, after: int = 0, tp: int = 1) -> tuple[int | None, list[str]]:
    """Returns the iteration whose values are loaded, and what was said."""
    said: list[str] = []
    copies = copies_of(base, said, tp=tp)
    found = copies.recover(after, accept)
    if found is None:
        return None, said
    chunks = chunks_of_rank(empty=True)
    loaded = copies.load(found[0], chunks, accept)
    step = loaded.manifest.iteration
    assert step == found[1].iteration and all(bool((chunk.tensor == value_of(step)).all()) for chunk in chunks)
    return step, said


def outcomes(function: Callable[..., object], *arguments: object) -> tuple[int | None, list[str]]:
    results = run_on_ranks(function, RANKS, *arguments)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("save", [save_steps, save_in_background])
def test_only_the_newest_copies_stay(tmp_path: Path, save: Callable[..., list[str]]) -> None:
    written = run_on_ranks(save, RANKS, str(tmp_path), 5, 6)
    expected = [
        f"host{holder // 2}/of_rank_{of:05d}/by_rank_{holder:05d}/iter_0000006"
        for holder in range(RANKS)
        for of in (holder, (holder - 2) % RANKS)
    ]
    assert sorted({*written[0], *written[2]}) == sorted(expected)
    assert outcomes(recover, str(tmp_path)) == (6, [])


def file_numbers(folder: Path, step: int) -> list[int]:
    return [path.stat().st_ino for path in sorted(folder.glob(f"host*/*/*/iter_{step:07d}/*.safetensors"))]


@pytest.mark.parametrize("save", [save_steps, save_in_background])
def test_a_copy_is_written_over_the_one_before_the_last(tmp_path: Path, save: Callable[..., list[str]]) -> None:
    """Its memory is used again. Here the files of the older one are longer."""
    run_on_ranks(save, RANKS, str(tmp_path), 5)
    first = file_numbers(tmp_path, 5)
    run_on_ranks(save, RANKS, str(tmp_path), 6)
    for path in tmp_path.glob("host*/*/*/spare/*.safetensors"):
        path.write_bytes(path.read_bytes() + b"rest")
    run_on_ranks(save, RANKS, str(tmp_path), 7)
    assert len(first) == 2 * RANKS and file_numbers(tmp_path, 7) == first
    assert not any(path.read_bytes().endswith(b"rest") for path in tmp_path.glob("host*/*/*/iter_*/*"))
    assert outcomes(recover, str(tmp_path)) == (7, [])


def test_what_is_left_of_another_rank_is_deleted(tmp_path: Path) -> None:
    run_on_ranks(save_steps, RANKS, str(tmp_path), 5, 6)
    for by in ("by_rank_00001", "by_rank_00009"):
        shutil.copytree(tmp_path / "host0/of_rank_00001/by_rank_00001", tmp_path / f"host0/of_rank_00009/{by}")
    run_on_ranks(save_steps, RANKS, str(tmp_path), 7)
    assert [*tmp_path.glob("host0/of_rank_00009/*/*")] == []


@pytest.mark.parametrize("host", [0, 1])
def test_a_lost_host_gets_its_state_from_the_other(tmp_path: Path, host: int) -> None:
    run_on_ranks(save_steps, RANKS, str(tmp_path), 5)
    shutil.rmtree(tmp_path / f"host{host}")
    lost, other = 2 * host, 2 - 2 * host
    said = [f"the state of rank {lost + i} at iteration 5 came from rank {other}" for i in (0, 1)]
    assert outcomes(recover, str(tmp_path)) == (5, said)
    assert outcomes(recover, str(tmp_path)) == (5, [])  # it has copies again


def test_two_hosts_lost_at_once_leave_nothing(tmp_path: Path) -> None:
    run_on_ranks(save_steps, RANKS, str(tmp_path), 5)
    for path in tmp_path.glob("host*/of_rank_00003"):
        shutil.rmtree(path)
    said = ["local copies of iteration 5 lack the state of ranks [3]"]
    assert outcomes(recover, str(tmp_path)) == (None, said)


def save_over_a_slow_link(base: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        take = FileReceiver.take
        patch.setattr(FileReceiver, "take", lambda *arguments: (time.sleep(0.05), take(*arguments)))
        return save_steps(base, 5)


def test_a_slow_link_costs_time_alone(tmp_path: Path) -> None:
    run_on_ranks(save_over_a_slow_link, RANKS, str(tmp_path))
    shutil.rmtree(tmp_path / "host1")
    assert outcomes(recover, str(tmp_path))[0] == 5


def test_older_copies_and_those_of_other_layouts_are_left_out(tmp_path: Path) -> None:
    run_on_ranks(save_steps, RANKS, str(tmp_path), 5)
    assert outcomes(recover, str(tmp_path), 5) == (None, [])
    step, said = outcomes(recover, str(tmp_path), 0, 2)
    assert step is None and len(said) == 2 and all(text.endswith("of another layout (tp 1)") for text in said)


OF_OTHERS = [f"host{by // 2}/of_rank_{of:05d}/by_rank_{by:05d}" for of, by in ((0, 0), (1, 1), (2, 2), (3, 1))]
"""A copy of each rank's state that is not on rank 3."""


def save_and_die(base: str, seldom: str, in_background: bool) -> None:
    """Rank 3 dies before the copies of the other host are complete. If it has sent its own copy, it waits until the
    others have written theirs."""
    sent = seldom != "of_rank_00003"

    def before(operation: str, path: Path) -> None:
        if dist.get_rank() == 3 and operation == "rename" and seldom in str(path):
            end = time.monotonic() + 60
            while sent and not all(Path(base, copy, "iter_0000006").exists() for copy in OF_OTHERS):
                assert time.monotonic() < end
                time.sleep(0.01)
            os._exit(9)

    write(copies_of(base, [], disk=Disk(before)), 6, in_background)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(("seldom", "expected"), [("of_rank_00003", 5), ("of_rank_00001", 6)])
def test_copies_count_once_all_ranks_have_one(tmp_path: Path, seldom: str, expected: int, in_background: bool) -> None:
    """A stale replica: some ranks have copies of iteration 6, and all still have those of 5. Rank 3 dies before it has
    sent its own copy of 6, or afterwards."""
    run_on_ranks(save_steps, RANKS, str(tmp_path), 5)
    ended = pytest.raises(AssertionError, match="rank 3: ended without an answer, exit code 9")
    with ended, Pool(RANKS, patience=0.2) as pool:  # the others wait for each other
        pool.run(save_and_die, RANKS, str(tmp_path), seldom, in_background)
    for path in tmp_path.glob("host1/of_rank_00003/by_rank_00003/iter_0000006"):
        shutil.rmtree(path)  # what it has written itself is lost with it
    step, _ = outcomes(recover, str(tmp_path))
    assert step == expected
    assert outcomes(recover, str(tmp_path))[0] == expected


def test_a_broken_copy_is_replaced_by_another(tmp_path: Path) -> None:
    run_on_ranks(save_steps, RANKS, str(tmp_path), 5)
    broken = next(tmp_path.glob("host0/of_rank_00001/by_rank_00001/*/*.safetensors"))
    content = bytearray(broken.read_bytes())
    content[-5] ^= 4
    broken.write_bytes(content)
    step, said = outcomes(recover, str(tmp_path))
    assert step == 5 and said[0].startswith(f"a local copy is broken: {broken}: the bytes of")
    assert said[1:] == ["the state of rank 1 at iteration 5 came from rank 2"]


def save_on_a_full_disk(base: str, full: int, in_background: bool) -> str:
    def before(operation: str, path: Path) -> None:
        if dist.get_rank() == full and operation == "write" and path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with pytest.raises(UserError) as caught:
        write(copies_of(base, [], disk=Disk(before)), 6, in_background)
    return str(caught.value)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path, in_background: bool) -> None:
    run_on_ranks(save_steps, RANKS, str(tmp_path), 5)
    texts = run_on_ranks(save_on_a_full_disk, RANKS, str(tmp_path), 2, in_background)
    assert all("No space left on device" in text and "rank_00002" in text for text in texts)
    assert not [*tmp_path.glob("**/*.tmp-*")]
    assert outcomes(recover, str(tmp_path)) == (5, [])


def refuse(base: str) -> tuple[int | None, list[str]]:
    said: list[str] = []

    def outdated(manifest: Manifest) -> None:
        raise OutdatedCheckpoint("it", "is outdated")

    assert copies_of(base, said).recover(0, outdated) is None
    return None, said


def test_a_copy_may_be_refused(tmp_path: Path) -> None:
    run_on_ranks(save_steps, RANKS, str(tmp_path), 5)
    assert outcomes(refuse, str(tmp_path)) == (None, ["it: is outdated"])


def test_distances_to_copies() -> None:
    assert copy_offsets(16, 8, 2) == (8,) and copy_offsets(16, 4, 4) == (4, 8, 12)
    with pytest.raises(UserError, match=r"steps of 8 ranks from a rank of 16 reach 2 ranks, .* and 3 copies"):
        copy_offsets(16, 8, 3)


def test_a_run_that_begins_anew_has_a_folder_of_its_own(tmp_path: Path) -> None:
    ranks, save = RankCoordinator(), tmp_path / "save"
    first = root_of_run(tmp_path / "local", save, ranks)
    assert root_of_run(tmp_path / "local", save, ranks) == first and first.parent == tmp_path / "local"
    shutil.rmtree(save)
    assert root_of_run(tmp_path / "local", save, ranks) != first
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        root_of_run(tmp_path / "local", tmp_path / "file", ranks)


def test_a_copy_without_a_wanted_tensor_changes_nothing(tmp_path: Path) -> None:
    copies = LocalCopies(tmp_path, RankCoordinator(), {}, (), print)
    chunk = chunks_of_one(1.0, "a")
    copies.save([chunk], step=1, common={"iteration": 1}, config={})
    found = copies.recover(0, accept)
    assert found is not None
    wanted = [chunks_of_one(7.0, "a"), chunks_of_one(7.0, "b")]
    with pytest.raises(UserError, match="has no b"):
        copies.load(found[0], wanted, accept)
    assert all(bool((chunk.tensor == 7.0).all()) for chunk in wanted)


def chunks_of_one(value: float, name: str) -> Chunk:
    return Chunk(name, (3,), Box.whole((3,)), None, torch.full((3,), value))
