"""Checkpoints of a run: saved state is restored, and the effect of each flag."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.command_lines import configured
from support.processes import run_on_ranks
from support.small_models import SmallModel, batch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parameters import info_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid
from megatron.training import global_vars
from megatron.training.checkpointing import (
    Checkpoints,
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    load_checkpoint,
    read_metadata,
    read_run_description,
    save_checkpoint,
)
from megatron.training.state import TrainState

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp64": {"dtype": torch.float64, "settings": {}},
    "fp32 sgd": {"dtype": torch.float32, "settings": {"optimizer": "sgd"}},
    "bf16 with masters": {"dtype": torch.bfloat16, "settings": {"bf16": True}},
    "fp16 with a loss scale": {
        "dtype": torch.float16,
        "settings": {"fp16": True, "initial_loss_scale": 2.0**20, "loss_scale_window": 2, "hysteresis": 1},
    },
}


@dataclass
class SmallRun:
    """A small model that trains, and its checkpoints."""

    model: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler
    state: TrainState
    checkpoints: Checkpoints

    @classmethod
    def make(cls, flags: str = "", dtype=torch.float64, settings=None, seed=5, **model) -> "SmallRun":
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        groups = ProcessGroupCollection.from_grid(RankGrid(world), rank)
        inner = SmallModel(dtype=dtype, seed=seed, padded=3, **model)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        ddp = DistributedDataParallel(inner.config, ddp_config, inner, pg_collection=groups)
        options = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0, **(settings or {})}
        optimizer = get_megatron_optimizer(OptimizerConfig(**options), [ddp])
        scheduler = OptimizerParamScheduler(optimizer, 0.0, 0.01, 0.001, 4, 40, "cosine", 0.1, 0.1, 40, "constant")
        config = configured(f"--lr-warmup-iters 1 {flags}", ranks=world)
        return cls(ddp, optimizer, scheduler, TrainState(), Checkpoints(config, groups))

    def train(self, steps: int) -> "SmallRun":
        for _ in range(steps):
            self.model.zero_grad_buffer()
            loss = self.model(*batch(self.state.consumed_train_samples, rows=4))
            self.optimizer.scale_loss(loss / 20).backward()
            self.model.finish_grad_sync()
            update = self.optimizer.step_on_device()
            self.scheduler.advance_on_device(update.update_applied, increment=4)
            self.state.iteration += 1
            self.state.consumed_train_samples += 4
            self.state.floating_point_operations_so_far += 1e12
        return self

    def save(self) -> None:
        self.checkpoints.save(self.state, [self.model], self.optimizer, self.scheduler)

    def load(self) -> bool:
        return self.checkpoints.load(self.state, [self.model], self.optimizer, self.scheduler)

    def everything(self) -> dict[str, Any]:
        """All state, by name, for comparison to the bit."""
        tensors = {info_of(p).name: p.detach().clone() for p in self.model.parameters()}
        tensors |= self.optimizer.state_dict()["state"]
        common = [self.state.to_json(), self.scheduler.state_dict(), self.optimizer.common_state()]
        return {"common": common, "lr": float(self.optimizer.param_groups[0]["lr"]), **tensors}

    def weights(self) -> dict[str, torch.Tensor]:
        return {info_of(p).name: p.detach().view(-1)[: info_of(p).box.numel].clone() for p in self.model.parameters()}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def same(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return x.dtype == y.dtype and torch.equal(x, y)
        return x == y

    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


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
def current():
    """Makes a small run the one that Megatron-LM's functions act on."""

    def make(run: SmallRun) -> SmallRun:
        config, groups = run.checkpoints.config, run.checkpoints.groups
        environment = SimpleNamespace(groups=groups)
        global_vars.set_current_run(
            SimpleNamespace(config=config, environment=environment, state=run.state, tokenizer=None, timers=None)
        )
        return run

    global_vars.clear_current_run()  # whatever an earlier test in this process has left
    yield make
    global_vars.clear_current_run()


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


def test_a_checkpoint_without_optimizer_state(tmp_path, capsys):
    run = SmallRun.make(f"--save {tmp_path} --no-save-optim").train(2)
    run.save()
    with pytest.raises(UserError, match=r"was saved without optimizer state.*--no-load-optim"):
        SmallRun.make(f"--load {tmp_path}").load()
    other = SmallRun.make(f"--load {tmp_path} --no-load-optim", seed=77)
    other.load()
    assert equal(other.weights(), run.weights()) and other.state == run.state


def test_ckpt_step(saved, tmp_path):
    run = SmallRun.make(f"--load {tmp_path} --ckpt-step 2")
    run.load()
    assert run.state.iteration == 2
    with pytest.raises(UserError, match=r"has no checkpoint of iteration 3; it has: 2, 4"):
        SmallRun.make(f"--load {tmp_path} --ckpt-step 3").load()


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


def test_another_model_is_refused_by_flag_and_finetune_says_so(saved, tmp_path, capsys):
    other = "--norm-epsilon 1e-6 --swiglu"
    with pytest.raises(UserError) as error:
        SmallRun.make(f"--load {tmp_path} {other}").load()
    message = str(error.value)
    assert "--norm-epsilon is 1e-06 in this run and 1e-05 in the checkpoint" in message
    assert "--finetune to change the model on purpose" in message
    capsys.readouterr()
    assert SmallRun.make(f"--load {tmp_path} {other} --finetune").load()
    assert "WARNING: --norm-epsilon is 1e-06 in this run and 1e-05 in the checkpoint" in capsys.readouterr().out


def test_flags_without_meaning_for_the_model_are_not_compared(saved, tmp_path):
    assert SmallRun.make(f"--load {tmp_path} --rotary-base 5").load()  # positions are learned


def test_keys_that_do_not_fit(saved, tmp_path, capsys):
    with pytest.raises(UserError, match=r"keys of this run are not in it: layers\.3\.bias, .*layers\.3\.norm"):
        SmallRun.make(f"--load {tmp_path}", layers=4).load()
    with pytest.raises(UserError, match=r"keys are not used by this run: layers\.2\.bias"):
        SmallRun.make(f"--load {tmp_path}", layers=2).load()
    capsys.readouterr()
    assert SmallRun.make(f"--load {tmp_path} --dist-ckpt-strictness log_all", layers=2).load()
    out = capsys.readouterr().out
    assert re.search(r"keys of the checkpoint are not used: layers\.2\.bias", out)
    assert SmallRun.make(f"--load {tmp_path} --ckpt-waive-keys *layers.2.*", layers=2).load()
    with pytest.raises(UserError, match=r"embedding\.table has shape \[13, 8\] in this run and \[13, 6\] in the"):
        SmallRun.make(f"--load {tmp_path}", width=8).load()


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


def test_the_run_that_wrote_a_checkpoint_can_be_read(saved, tmp_path):
    described = read_run_description(tmp_path)
    assert described["architecture"]["hidden_size"] == 64 and "--hidden-size" in described["command_line"]
    with pytest.raises(UserError, match="holds no checkpoint"):
        read_run_description(tmp_path / "nothing")


# ---------------------------------------------------------------------------------------------------------------------
# Megatron-LM's functions


def test_megatron_lm_functions_save_and_load_the_run(tmp_path, current):
    folder = f"--save {tmp_path} --load {tmp_path}"
    run = current(SmallRun.make(folder).train(3))
    save_checkpoint(3, [run.model], run.optimizer, run.scheduler, 7e12)
    assert run.state.floating_point_operations_so_far == 3e12  # the loop's own counts are the loop's
    other = current(SmallRun.make(folder, seed=77))
    assert load_checkpoint(other.model, other.optimizer, other.scheduler) == (3, 7e12)
    run.state.floating_point_operations_so_far = 7e12
    assert equal(other.everything(), run.everything())


def test_megatron_lm_functions_say_what_there_is_not(tmp_path, current):
    run = SmallRun.make(f"--load {tmp_path}")
    parts = (run.model, run.optimizer, run.scheduler)
    with pytest.raises(UserError, match="there is no run yet"):
        load_checkpoint(*parts)
    current(run)
    assert load_checkpoint(*parts) == (0, 0.0)
    with pytest.raises(UserError, match="which is not given"):
        save_checkpoint(1, *parts, 0.0)
    with pytest.raises(UserError, match=r"save_checkpoint\(release=...\): not yet"):
        save_checkpoint(1, *parts, 0.0, release=True)
    with pytest.raises(UserError, match=r"load_checkpoint\(skip_load_to_model_and_opt=...\): not yet"):
        load_checkpoint(*parts, skip_load_to_model_and_opt=True)


def test_the_file_that_names_the_newest_checkpoint(tmp_path):
    tracker = Path(get_checkpoint_tracker_filename(tmp_path))
    with pytest.raises(UserError, match="No such file"):
        read_metadata(tracker)
    for word, expected in {"12": (12, False), "release": (0, True)}.items():
        tracker.write_text(word)
        assert read_metadata(tracker) == expected
    tracker.write_text("soon")
    with pytest.raises(UserError, match="holds 'soon'"):
        read_metadata(tracker)
    assert get_checkpoint_name(tmp_path, 12) == str(tmp_path / "iter_0000012")
    assert get_checkpoint_name(tmp_path, 0, release=True) == str(tmp_path / "release")
