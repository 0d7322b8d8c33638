"""--non-persistent-ckpt-type local: a run goes on from the copies on its hosts, with the same losses."""

import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from support.runs import GPT, TINY, differences, train, train_on_ranks
from support.small_run import SmallRun, equal

from megatron.core.dist_checkpointing import local_copies
from megatron.core.dist_checkpointing.file_pieces import BUFFER_BYTES
from megatron.core.dist_checkpointing.local_copies import LocalCopies
from megatron.core.dist_checkpointing.local_writing import CopyWriter
from megatron.core.exceptions import UserError
from megatron.data.tokenizer.build import build_tokenizer
from megatron.diagnosis.dry_run.dry_run import dry_run
from megatron.diagnosis.dry_run.report import report_lines, size_text
from megatron.diagnosis.memory.rank_memory import rank_memory
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment

FLAGS = "--mock-data --train-iters 8 --use-distributed-optimizer --micro-batch-size 2 --lr-warmup-iters 3"


def local_flags(folder: Path, more: str = "") -> str:
    where = f"--non-persistent-local-ckpt-dir {folder / 'local'} --non-persistent-save-interval 1 {more}"
    return f"{FLAGS} --save {folder / 'save'} --load {folder / 'save'} --non-persistent-ckpt-type local {where}"


def lose(folder: Path, iteration: int) -> None:
    """Deletes the checkpoint of an iteration, as if the run had been killed before it was written."""
    shutil.rmtree(folder / "save" / f"iter_{iteration:07d}")
    (folder / "save" / "latest_checkpointed_iteration.txt").unlink()


def copies(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("local/*/*/*/iter_*")}


@pytest.mark.fast("--async-save")  # the test of a lost rank saves without it
@pytest.mark.parametrize("more", ["", "--async-save"])
def test_a_run_goes_on_from_its_hosts(tmp_path: Path, more: str) -> None:
    straight = train_on_ranks(FLAGS, 2)
    flags = local_flags(tmp_path, f"--save-interval 3 {more}")
    train_on_ranks(f"{flags} --exit-interval 5", 2)
    lose(tmp_path, 5)
    assert copies(tmp_path) == {"iter_0000004"}
    again = train_on_ranks(flags, 2)
    for before, after in zip(straight, again, strict=True):
        assert after.losses == before.losses[4:]
        assert differences(after.at_end, before.at_end) == []


def test_a_complete_run_leaves_none_and_the_next_one_deletes_those_of_a_killed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = local_flags(tmp_path, "--save-interval 3")
    train(f"{flags} --exit-interval 5")
    old = next((tmp_path / "local").iterdir())
    shutil.rmtree(tmp_path / "save")
    capsys.readouterr()
    train(f"{flags} --exit-interval 2")
    assert not old.exists() and f"{old}: deleted " in capsys.readouterr().out
    assert len([*(tmp_path / "local").iterdir()]) == 1
    train(flags)
    assert [*(tmp_path / "local").iterdir()] == []


def test_an_upcycled_run_goes_on_from_its_hosts(tmp_path: Path) -> None:
    dense, folder = "--swiglu --ffn-hidden-size 64", tmp_path / "new"
    train(f"--mock-data --train-iters 2 --save {tmp_path / 'dense'}", base=f"{TINY} {dense}")
    upcycle = f"{dense} --num-experts 4 --moe-use-upcycling --moe-router-topk 2"
    flags = local_flags(folder, upcycle).replace(f"--load {folder / 'save'}", f"--load {tmp_path / 'dense'}")
    straight = train(flags.replace(str(folder), str(tmp_path / "straight")))
    train(f"{flags} --exit-interval 5")
    lose(folder, 5)
    assert copies(folder) == {"iter_0000004"}
    again = train(flags)
    assert again.losses == straight.losses[4:] and differences(again.at_end, straight.at_end) == []


def test_a_lost_rank_takes_the_copy_of_another(tmp_path: Path) -> None:
    straight = train_on_ranks(FLAGS, 2)
    flags = local_flags(tmp_path, "--replication")
    train_on_ranks(f"{flags} --exit-interval 5", 2)
    lose(tmp_path, 5)
    for path in tmp_path.glob("local/*/of_rank_00001/by_rank_00001"):
        shutil.rmtree(path)
    assert train_on_ranks(flags, 2)[0].losses == straight[0].losses[4:]
    for path in tmp_path.glob("local/*/of_rank_00001"):
        shutil.rmtree(path)
    lose(tmp_path, 8)
    assert len(train_on_ranks(flags, 2)[0].losses) == 8  # nothing is left: a new run


def test_copies_of_another_layout_are_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = local_flags(tmp_path, "--save-interval 3")
    train_on_ranks(f"{flags} --exit-interval 5", 2)
    lose(tmp_path, 5)
    capfd.readouterr()
    assert len(train(flags).losses) == 5  # from the checkpoint of iteration 3
    assert "are those of another layout (world_size 2, dp 2)" in capfd.readouterr().out


def test_a_checkpoint_that_is_as_new_is_preferred(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SmallRun.make(local_flags(tmp_path))
    run.train(2)
    run.checkpoints.save(run.parts, temporary=True)
    run.checkpoints.save(run.parts)
    again = SmallRun.make(local_flags(tmp_path), seed=77)
    assert again.load() and equal(again.everything(), run.everything()) and again.checkpoints.last_saved == 2
    run.train(1)
    run.checkpoints.save(run.parts, temporary=True)
    third = SmallRun.make(local_flags(tmp_path), seed=77)
    assert third.load() and equal(third.everything(), run.everything()) and third.checkpoints.last_saved is None
    asked = SmallRun.make(local_flags(tmp_path, "--ckpt-step 2"), seed=77)
    assert asked.load() and asked.state.iteration == 2


def test_a_full_disk_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> int:
        raise UserError("/local: No space left on device")

    monkeypatch.setattr(LocalCopies, "save", full)
    run = SmallRun.make(local_flags(tmp_path))
    run.checkpoints.save(run.train(1).parts, temporary=True)
    said = capsys.readouterr().out
    assert "WARNING: no local copies of iteration       1, and training goes on: /local: No space left" in said


def test_a_copy_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training changes the state while a copy of it is written. A copy that fails ends no run."""
    run = SmallRun.make(local_flags(tmp_path, "--async-save"))
    let_write, save = threading.Event(), CopyWriter.save

    def late(*arguments: Any) -> int:
        assert let_write.wait(60)
        return save(*arguments)

    monkeypatch.setattr(CopyWriter, "save", late)
    then = run.train(1).everything()
    run.checkpoints.begin_save(run.parts, temporary=True)
    run.train(1)
    assert not copies(tmp_path)
    let_write.set()
    run.checkpoints.finish_save()
    said = capsys.readouterr().out
    assert re.search(r"local copies of iteration       1 are in .*B of rank 0, in .* s, of which training waited", said)
    assert copies(tmp_path) == {"iter_0000001"}
    again = SmallRun.make(local_flags(tmp_path), seed=77)
    assert again.load() and equal(again.everything(), then)

    def full(*_: object) -> int:
        raise UserError("/local: No space left on device")

    monkeypatch.setattr(CopyWriter, "save", full)
    run.checkpoints.begin_save(run.parts, temporary=True)
    run.checkpoints.finish_save()
    said = capsys.readouterr().out
    assert "WARNING: no local copies of iteration       2, and training goes on: /local: No space left" in said


def test_a_copy_that_breaks_while_it_is_read_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of half a copy must not begin a new run. A copy that does not fit changes nothing, and is left out."""
    run = SmallRun.make(local_flags(tmp_path))
    run.checkpoints.save(run.train(1).parts, temporary=True)

    def broken(*_: object) -> None:
        raise UserError("the disk is gone")

    monkeypatch.setattr(local_copies, "fill_tensors", broken)
    with pytest.raises(UserError, match="the disk is gone"):
        SmallRun.make(local_flags(tmp_path)).load()
    monkeypatch.setattr(local_copies, "plan_reads", broken)
    assert not SmallRun.make(local_flags(tmp_path)).load()


def test_what_does_not_go_together_is_told(tmp_path: Path) -> None:
    for more, text in (
        ("--non-persistent-ckpt-type local", "--non-persistent-ckpt-type local needs --non-persistent-local-ckpt-dir"),
        (
            "--non-persistent-local-ckpt-dir x",
            "--non-persistent-local-ckpt-dir x needs --non-persistent-ckpt-type local",
        ),
        ("--replication", "--replication needs --non-persistent-ckpt-type local"),
    ):
        with pytest.raises(UserError, match=text):
            train(f"{FLAGS} --save {tmp_path} --non-persistent-save-interval 1 {more}")
    words = f"{TINY} {local_flags(tmp_path, '--replication --replication-jump 2')}".split()
    with pytest.raises(UserError, match=r"--replication-jump 2 with --replication-factor 2: steps of 2 ranks"):
        configure(words, launch_environment=LaunchEnvironment(2, False))
    jump = configure(
        [*words[:-2], "--global-batch-size", "32"], launch_environment=LaunchEnvironment(16, False, ranks_of_host=8)
    )
    assert jump.checkpoint.replication_jump == 8


@pytest.mark.parametrize("more", ["", "--bf16"])
def test_the_dry_run_says_how_much_they_take(tmp_path: Path, more: str) -> None:
    flags = f"{local_flags(tmp_path, more)} --vocab-size 127"
    train(f"{flags} --exit-interval 2")
    taken = sum(path.stat().st_size for path in tmp_path.glob("local/**/*.safetensors"))
    config = configure(f"{TINY} {flags} --dry-run".split(), launch_environment=LaunchEnvironment(1, False))
    (rank,) = rank_memory(config, GPT, build_tokenizer(config.tokenizer), 128)
    saved = sum(path.stat().st_size for path in tmp_path.glob("save/iter_0000002/**/*.safetensors"))
    two = configure(f"{TINY} {flags} --dry-run".split(), launch_environment=LaunchEnvironment(2, False))
    assert saved == pytest.approx(rank.memory.saved, rel=0.03)
    assert saved == pytest.approx(sum(each.memory.saved for each in dry_run(two, GPT).ranks), rel=0.03)
    assert taken == pytest.approx(rank.memory.local_copy, rel=0.03)
    lines = [*report_lines(config, dry_run(config, GPT))]
    assert f"checkpoint  {size_text(rank.memory.saved)} in {tmp_path / 'save'}: " in "\n".join(lines)
    said = next(line for line in lines if line.startswith("local copy"))
    assert said.startswith(f"local copy  {size_text(rank.memory.local_copy)} on each rank, in ")
    twice = size_text(2 * rank.memory.local_copy)
    assert f": {rank.memory.local_copy / 1e9:.2g} s at 1 GB/s for each rank; {twice} from the second one on" in said
    assert not any(line.startswith("staging") for line in lines)


def test_the_dry_run_counts_the_memory_of_copies_in_the_background(tmp_path: Path) -> None:
    flags = f"{TINY} {local_flags(tmp_path, '--async-save')} --vocab-size 127"
    for ranks, more in ((1, 0), (2, BUFFER_BYTES)):
        words = f"{flags} --dry-run {'--replication' if ranks > 1 else ''}".split()
        config = configure(words, launch_environment=LaunchEnvironment(ranks, False))
        found = dry_run(config, GPT)
        staged = found.memory.local_copy + more
        assert f"staging     {size_text(staged)} of host memory on each rank" in "\n".join(report_lines(config, found))
