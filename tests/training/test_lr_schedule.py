"""The schedule of a run, and the message if a checkpoint has another one."""

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.command_lines import configured
from support.processes import run_on_ranks
from support.runs import train

from megatron.core.exceptions import UserError
from megatron.core.schedule.optimizer_param_scheduler import STATE_NAMES
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.lr_schedule import build_scheduler, schedule_flag
from megatron.training.setup.sizes import sample_counts

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --lr 1e-3 "
MODEL += "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --global-batch-size 4 "


@pytest.mark.parametrize(
    ("flags", "attribute", "called"),
    [
        ("--train-iters 10", "lr_decay_steps", "--train-iters (in samples)"),
        ("--train-iters 10 --lr-decay-iters 8", "lr_decay_steps", "--lr-decay-iters (in samples)"),
        ("--train-samples 40", "lr_decay_steps", "--train-samples (in samples)"),
        ("--train-samples 40 --lr-decay-samples 32", "lr_decay_steps", "--lr-decay-samples (in samples)"),
        ("--train-iters 10", "lr_warmup_steps", "--lr-warmup-iters (in samples)"),
        ("--train-samples 40", "lr_warmup_steps", "--lr-warmup-samples (in samples)"),
        ("--train-iters 10 --lr-warmup-fraction 0.1", "lr_warmup_steps", "--lr-warmup-fraction (in samples)"),
        ("--train-iters 10", "wd_incr_steps", "--train-iters (in samples)"),
        ("--train-iters 10", "max_lr", "--lr"),
        ("--train-iters 10 --weight-decay 0.2", "end_wd", "--weight-decay"),
    ],
)
def test_attributes_of_the_schedule_are_called_by_the_flag_that_sets_them(flags, attribute, called):
    assert schedule_flag(configured(flags, base=MODEL), attribute) == called


def test_every_attribute_that_a_checkpoint_may_contradict_has_a_flag():
    config = configured("--train-iters 10", base=MODEL)
    assert all(schedule_flag(config, name).startswith("--") for name in STATE_NAMES if name != "num_steps")


def test_both_learning_rates_are_logged_with_decoupled_lr():
    outcome = train("--train-iters 2 --lr 1e-3 --mock-data --decoupled-lr 4e-3 --lr-decay-style linear --eval-iters 0")
    rates = [(step.learning_rate, step.decoupled_learning_rate) for step in outcome.steps]
    assert rates == [pytest.approx((1e-3, 4e-3)), pytest.approx((5e-4, 2e-3))]


def test_a_fraction_of_the_decay_is_not_rounded():
    config = configured("--train-iters 10 --lr-decay-iters 7 --lr-warmup-fraction 0.1", base=MODEL)
    optimizer = SimpleNamespace(param_groups=[], device="cpu")
    assert build_scheduler(config, optimizer).lr_warmup_steps == 0.1 * 28
    whole = build_scheduler(configured("--train-iters 10 --lr-warmup-iters 2", base=MODEL), optimizer)
    assert whole.lr_warmup_steps == 8 and isinstance(whole.lr_warmup_steps, int)


def go_on(folder: Path, flags: str) -> str:
    """Returns what this rank prints when it resumes a run."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        train(f"--mock-data --eval-iters 0 --load {folder} {flags}")
    return printed.getvalue()


@pytest.mark.slow
def test_going_on_with_another_length_speaks_of_flags_and_once_for_all_ranks(tmp_path):
    train(f"--mock-data --eval-iters 0 --train-iters 2 --save {tmp_path}")
    first, second = run_on_ranks(go_on, 2, tmp_path, "--train-iters 3 --override-opt-param-scheduler")
    assert first.count("schedule: ") == 1 and "schedule: " not in second
    assert "schedule: --train-iters (in samples) is 12, overriding the checkpoint's 8" in first
    with pytest.raises(UserError, match=r"--train-iters \(in samples\) is 12 in this run and 8 in the checkpoint"):
        train(f"--mock-data --eval-iters 0 --load {tmp_path} --train-iters 3")


@pytest.mark.parametrize("growth", ["--global-batch-size 8 --rampup-batch-size 2 2 24", "--step-batch-size-schedule"])
def test_steps_of_a_growing_batch_count_by_their_samples(growth):
    """The published 175B example has --rampup-batch-size beside --train-iters."""
    words = growth.split() + (["0:2 1024:4 3K:8"] if growth.endswith("schedule") else [])
    flags = "--lr-decay-iters 12 --lr-warmup-iters 3 --lr-decay-style WSD --lr-wsd-decay-iters 4 --train-iters 16"
    words = [*MODEL.replace("--global-batch-size 4", "").split(), *flags.split(), *words]
    config = configure(words, launch_environment=LaunchEnvironment(1, False))
    sizes = [2] * 4 + [4] * 2 + [6] * 2 + [8] * 8 if "--rampup-batch-size" in growth else [2] * 4 + [4] * 4 + [8] * 8
    optimizer = SimpleNamespace(param_groups=[], schedule=lambda *arguments: None)
    built = build_scheduler(config, optimizer, kind=lambda optimizer, **values: values)
    assert built["wd_incr_steps"] == sum(sizes) and built["lr_decay_steps"] == sum(sizes[:12])
    assert built["lr_warmup_steps"] == sum(sizes[:3]) and built["wsd_decay_steps"] == sum(sizes[8:12])
    assert sample_counts(config).train == sum(sizes)
