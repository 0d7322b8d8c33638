"""Megatron-LM's functions save and load the run that was set up last."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.runs import TINY, train
from support.small_run import SmallRun, equal

from megatron.core.exceptions import UserError
from megatron.facades import global_vars
from megatron.facades.checkpointing import (
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    load_args_from_checkpoint,
    load_checkpoint,
    read_metadata,
    save_checkpoint,
)
from megatron.training.arguments import parse_args, validate_args


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

    global_vars.clear_current_run()  # an earlier test in this process may have left one
    yield make
    global_vars.clear_current_run()


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
    with pytest.raises(UserError, match="contains 'soon'"):
        read_metadata(tracker)
    assert get_checkpoint_name(tmp_path, 12) == str(tmp_path / "iter_0000012")
    assert get_checkpoint_name(tmp_path, 0, release=True) == str(tmp_path / "release")


def test_arguments_of_a_checkpoint(tmp_path, monkeypatch, capsys):
    """Between `parse_args` and `validate_args`, as scripts call it that convert or use a checkpoint."""
    train(
        f"--mock-data --eval-iters 0 --train-iters 1 --save {tmp_path} --swiglu --num-layers 3 --hidden-dropout 0.2",
        base=TINY,
    )
    words = "--micro-batch-size 1 --lr 1e-2 --train-iters 2 --mock-data --hidden-dropout 0 --vocab-size 50"
    monkeypatch.setattr(sys, "argv", ["script.py", *words.split(), "--load", str(tmp_path)])
    args = parse_args()
    found, theirs = load_args_from_checkpoint(args)
    assert found is args and theirs.train_iters == 1 and theirs.num_layers == 3
    validate_args(args)
    assert (args.num_layers, args.hidden_size, args.swiglu, args.seq_length) == (3, 32, True, 16)
    assert (args.train_iters, args.vocab_size) == (2, 50)  # the script's own
    assert args.hidden_dropout == 0 and "given flags stay: --hidden-dropout 0.0 (0.2 in" in capsys.readouterr().out
    with pytest.raises(UserError, match="comes before validate_args"):
        load_args_from_checkpoint(args)
    args = parse_args()
    assert load_args_from_checkpoint(args, "save") == (args, None) and args.hidden_size is None
    args.ckpt_step = 7
    with pytest.raises(UserError, match="no checkpoint of iteration 7"):
        load_args_from_checkpoint(args)
    args.pretrained_checkpoint = str(tmp_path)
    load_args_from_checkpoint(args, "pretrained_checkpoint")
    assert args.hidden_size == 32
    args = parse_args()
    args.hidden_size = 64  # by the script
    with pytest.raises(UserError, match="--hidden-size is 64 in this run and 32 in"):
        load_args_from_checkpoint(args)


def test_a_script_without_optimizer_loads_the_model(tmp_path, current):
    folder = f"--save {tmp_path} --load {tmp_path}"
    run = current(SmallRun.make(folder).train(2))
    save_checkpoint(2, [run.model], run.optimizer, run.scheduler, 0.0)
    other = current(SmallRun.make(folder, seed=77))
    before = {name: value.clone() for name, value in other.optimizer.state_dict().items() if torch.is_tensor(value)}
    assert load_checkpoint(other.model.module, None, None) == (2, 0.0)
    weights = zip(run.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in weights)
    after = other.optimizer.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()) and other.scheduler.num_steps == 0
