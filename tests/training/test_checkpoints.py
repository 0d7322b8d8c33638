"""Checkpoints of a run: saved state is restored, and the effect of each flag."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.small_run import PRECISIONS, SmallRun, equal

from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.exceptions import UserError
from megatron.core.parameters import info_of


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stopping_and_going_on_changes_nothing(tmp_path, precision):
    """4 + 4 steps equal 8 to the bit: weights, masters, moments, loss scale, schedule, counts."""
    folder = f"--save {tmp_path} --load {tmp_path}"
    straight = SmallRun.make(**PRECISIONS[precision]).train(8)
    first = SmallRun.make(folder, **PRECISIONS[precision]).train(4)
    first.save()
    second = SmallRun.make(folder, seed=77, **PRECISIONS[precision])
    assert not equal(second.everything(), first.everything())
    assert second.load() and equal(second.everything(), first.everything())
    assert second.checkpoints.last_saved == 4
    assert equal(second.train(4).everything(), straight.everything())
    if precision.startswith("fp16"):
        assert straight.optimizer.get_loss_scale() != 2.0**20  # it did move


def train_and_save(folder: str, precision: str) -> dict[str, Any]:
    run = SmallRun.make(f"--save {folder}", **PRECISIONS[precision]).train(3)
    run.save()
    return run.everything()


def load_and_save_again(folder: str, other: str, precision: str) -> dict[str, Any]:
    run = SmallRun.make(f"--load {folder} --save {other}", seed=77, **PRECISIONS[precision])
    assert run.load()
    run.save()
    return run.everything()


@pytest.mark.parametrize("precision", [pytest.param("fp64", marks=pytest.mark.slow), "bf16 with masters"])
def test_through_other_numbers_of_ranks(tmp_path, precision):
    """1 -> 2 -> 4 -> 1 rank: every state bit-equal on every rank."""
    folders = [str(tmp_path / name) for name in "abcd"]
    (expected,) = run_on_ranks(train_and_save, 1, folders[0], precision)
    for ranks, source, target in ((2, 0, 1), (4, 1, 2), (1, 2, 3)):
        for found in run_on_ranks(load_and_save_again, ranks, folders[source], folders[target], precision):
            assert equal(found, expected)


def test_what_is_printed(tmp_path, capsys):
    run = SmallRun.make(f"--save {tmp_path} --load {tmp_path} --keep-last 1").train(3)
    run.save()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"saving checkpoint at iteration       3 to {tmp_path} in safetensors format"
    assert lines[1].startswith(
        f"  successfully saved checkpoint from iteration       3 to {tmp_path} [ t 1/1, p 1/1 ] ("
    )
    run.train(2).save()
    assert capsys.readouterr().out.splitlines()[2:] == ["  deleted iter_0000003 (--keep-last 1)"]
    run.load()
    assert capsys.readouterr().out == (
        f"loaded checkpoint of iteration       5 from {tmp_path}/iter_0000005 [ t 1/1, p 1/1 ]\n"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Flags


@pytest.fixture
def saved(tmp_path) -> SmallRun:
    run = SmallRun.make(f"--save {tmp_path} --load {tmp_path}").train(2)
    run.save()
    run.train(2).save()
    return run


def test_finetune_takes_weights_and_begins_anew(saved, tmp_path):
    run = SmallRun.make(f"--load {tmp_path} --save {tmp_path} --finetune", seed=77)
    fresh = run.everything()
    assert run.load()
    assert equal(run.weights(), saved.weights())
    left = run.everything()
    assert left["common"] == fresh["common"] and run.checkpoints.last_saved is None
    assert all(torch.equal(left[name], fresh[name]) for name in left if name.startswith("optimizer."))


@pytest.mark.parametrize("flags", ["--finetune", "--no-load-optim"])
def test_main_weights_follow_loaded_weights(tmp_path, flags):
    """In bfloat16 the step after loading must start from the checkpoint's main weights, not from the initial ones."""
    options = PRECISIONS["bf16 with masters"]
    first = SmallRun.make(f"--save {tmp_path}", **options).train(3)
    first.save()
    run = SmallRun.make(f"--load {tmp_path} {flags}", seed=77, **options)
    run.load()
    masters = {name: t for name, t in first.everything().items() if name.startswith("optimizer.param.")}
    assert masters and all(torch.equal(run.everything()[name], t) for name, t in masters.items())
    assert equal(run.weights(), first.weights())


def test_no_load_optim_goes_on_with_fresh_moments(saved, tmp_path, capsys):
    run = SmallRun.make(f"--load {tmp_path} --no-load-optim", seed=77)
    fresh = run.everything()
    capsys.readouterr()
    run.load()
    (line,) = capsys.readouterr().out.splitlines()  # nothing of keys that are not used: that was asked for
    assert line.startswith("loaded checkpoint") and line.endswith("(without optimizer state)")
    assert run.state == saved.state and run.scheduler.num_steps == saved.scheduler.num_steps
    assert run.optimizer.common_state() == fresh["common"][2]
    assert equal(run.weights(), saved.weights())


def test_ckpt_step(saved, tmp_path):
    run = SmallRun.make(f"--load {tmp_path} --ckpt-step 2")
    run.load()
    assert run.state.iteration == 2
    with pytest.raises(UserError, match=r"has no checkpoint of iteration 3; it has: 2, 4"):
        SmallRun.make(f"--load {tmp_path} --ckpt-step 3").load()
    with pytest.raises(UserError, match=r"has no checkpoint of iteration 3; it has: 2, 4"):
        SmallRun.make(f"--pretrained-checkpoint {tmp_path} --ckpt-step 3").load()


def test_a_temporary_checkpoint_is_loaded_while_it_is_the_newest(tmp_path, capsys):
    """--non-persistent-save-interval: one is kept beside the others. --ckpt-step counts in the folder of --load."""
    flags = f"--save {tmp_path} --load {tmp_path} --non-persistent-save-interval 1 --non-persistent-ckpt-type global"
    run, folder = SmallRun.make(flags), tmp_path / "non_persistent"
    for temporary in (False, True, True):
        run.train(1)
        run.checkpoints.save(run.parts, temporary=temporary)
    assert [path.name for path in folder.glob("iter_*")] == ["iter_0000003"] and run.checkpoints.last_saved == 1
    assert f"saved checkpoint from iteration       3 to {folder} " in capsys.readouterr().out
    again = SmallRun.make(flags, seed=77)
    assert again.load() and equal(again.everything(), run.everything()) and again.checkpoints.last_saved is None
    assert "the temporary checkpoint of iteration 3 in" in capsys.readouterr().out
    loaded = {}
    for more in ("--ckpt-step 1", f"--non-persistent-global-ckpt-dir {tmp_path / 'none'}"):
        other = SmallRun.make(f"{flags} {more}")
        other.load()
        loaded[more] = other.state.iteration
    assert set(loaded.values()) == {1}
    run.train(1).save()  # now that of --save is newer
    again.load()
    assert again.state.iteration == 4 and again.checkpoints.last_saved == 4


def test_another_iteration_than_that_of_the_checkpoint(saved, tmp_path, capsys):
    """--override-ckpt-iteration: data and counts continue there, weights and schedule as they were saved."""
    run = SmallRun.make(f"--load {tmp_path} --save {tmp_path} --override-ckpt-iteration 3 --global-batch-size 6")
    run.load()
    assert (run.state.iteration, run.state.consumed_train_samples, run.checkpoints.last_saved) == (3, 18, None)
    assert run.state.consumed_tokens == 18 * 128 and run.scheduler.num_steps == saved.scheduler.num_steps
    assert equal(run.weights(), saved.weights())
    assert "--override-ckpt-iteration: continues after iteration 3, not 4" in capsys.readouterr().out


def test_nothing_to_load(tmp_path, capsys):
    assert SmallRun.make(f"--load {tmp_path}").load() is False
    assert capsys.readouterr().out == f"no checkpoint in {tmp_path}: starting a new run\n"
    with pytest.raises(UserError, match=r"--load .* holds no checkpoint, and --exit-on-missing-checkpoint"):
        SmallRun.make(f"--load {tmp_path} --exit-on-missing-checkpoint").load()
    assert SmallRun.make().load() is False
    assert capsys.readouterr().out == ""


def test_pretrained_checkpoint(saved, tmp_path, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    run = SmallRun.make(f"--load {empty} --pretrained-checkpoint {tmp_path}", seed=77)
    assert run.load() and run.state.iteration == 0 and equal(run.weights(), saved.weights())
    with pytest.raises(UserError, match=r"--pretrained-checkpoint .* holds no checkpoint"):
        SmallRun.make(f"--pretrained-checkpoint {empty}").load()


def test_another_folder_to_save_into_has_no_checkpoint_yet(saved, tmp_path, tmp_path_factory):
    run = SmallRun.make(f"--load {tmp_path} --save {tmp_path_factory.mktemp('other')}")
    run.load()
    assert run.checkpoints.last_saved is None and run.state.iteration == 4


def test_full_precision_into_bfloat16_and_back(tmp_path, capsys):
    """float32 weights become main weights, and main weights float32 weights, without losing a bit."""
    full, narrow = {"dtype": torch.float32}, PRECISIONS["bf16 with masters"]
    first = SmallRun.make(f"--save {tmp_path / 'a'}", **full).train(3)
    first.save()
    second = SmallRun.make(f"--load {tmp_path / 'a'} --save {tmp_path / 'b'}", seed=77, **narrow)
    capsys.readouterr()
    second.load()
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "full-precision main weights are read from the weights",
        "tensors stored as float32 are loaded as bfloat16",
    ]
    second.save()
    capsys.readouterr()
    third = SmallRun.make(f"--load {tmp_path / 'b'}", seed=78, **full)
    third.load()
    assert capsys.readouterr().out.splitlines()[:-1] == ["weights are read from the full-precision main weights"]
    assert equal(third.everything(), first.everything())


def test_a_broken_newest_checkpoint_is_told_and_passed_over(saved, tmp_path, capsys):
    path = tmp_path / "iter_0000004" / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    run = SmallRun.make(f"--load {tmp_path}")
    capsys.readouterr()
    assert run.load() and run.state.iteration == 2
    out = capsys.readouterr().out
    assert f"WARNING: checkpoint {tmp_path / 'iter_0000004'} is broken: {path}: the bytes of" in out
    assert "loaded checkpoint of iteration       2" in out


def test_padding_of_a_vocabulary_may_change(saved, tmp_path):
    run = SmallRun.make(f"--load {tmp_path}")
    assert run.load()
    stored = {p.name: p for p in Path(tmp_path / "iter_0000004").iterdir()}
    assert stored
    (padded,) = (p for p in run.model.parameters() if info_of(p).padding)
    assert not padded.detach().view(-1)[info_of(padded).box.numel :].any()


def test_a_checkpoint_describes_the_run_that_wrote_it(saved, tmp_path):
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint is not None
    described = checkpoint.manifest.config
    assert described["architecture"]["hidden_size"] == 64 and "--hidden-size" in described["command_line"]
