"""Whole runs: what their results depend on, and the effect of flags."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool
from support.ports import free_port
from support.processes import run_on_ranks
from support.runs import GPT, Outcome, differences, stream, train, train_all_on_ranks

from megatron.core.exceptions import UserError
from megatron.core.optimizer.clip_grads import grad_norm
from megatron.training.config.resolution import ConfigurationError
from megatron.training.data.step_data import StepData
from megatron.training.providers import Context, ForwardStep, Providers
from megatron.training.trainer import Trainer

DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"


# ---------------------------------------------------------------------------------------------------------------------
# What the numbers do not depend on


@pytest.mark.slow_cases("")
@pytest.mark.parametrize("masks", ["", DOCUMENTS])
def test_any_micro_batch_size_gives_the_same_run(corpus, masks):
    flags = f"--fp64 --data-path {corpus} --train-iters 4 --eval-iters 1 --calculate-per-token-loss {masks}"
    one, two, four = (train(f"{flags} --micro-batch-size {size}") for size in (1, 2, 4))
    for other in (two, four):
        assert stream([other]) == stream([one])
        assert other.losses == pytest.approx(one.losses, abs=1e-11)
        assert norms(other) == pytest.approx(norms(one), rel=1e-11)
        assert evaluations(other) == pytest.approx(evaluations(one), abs=1e-11)
        assert furthest(other, one) < 1e-9


def test_the_mean_over_micro_batches_is_another_loss_where_masks_are_uneven(corpus):
    """Shows that the test above can fail."""
    flags = f"--fp64 --data-path {corpus} --train-iters 1 --eval-iters 0 {DOCUMENTS}"
    one, four = (train(f"{flags} --micro-batch-size {size}") for size in (1, 4))
    assert norms(one) != pytest.approx(norms(four), rel=1e-4)


def norms(outcome: Outcome) -> list[float]:
    return [step.grad_norm for step in outcome.steps if step.grad_norm is not None]


def evaluations(outcome: Outcome) -> list[float]:
    return [record.losses["lm loss"] for record in outcome.validations]


def furthest(a: Outcome, b: Outcome) -> float:
    """Largest difference of any weight."""
    assert a.weights.keys() == b.weights.keys()
    return max(float((a.weights[name] - b.weights[name]).abs().max()) for name in a.weights)


# ---------------------------------------------------------------------------------------------------------------------
# Packed documents


def test_packed_documents_are_separate_documents(corpus):
    """Losses and gradients of a packed batch are those of its documents, each put through the model alone."""
    found: dict[str, Any] = {}

    def compare(run: Trainer) -> None:
        model, config = run.model[0].eval(), run.config
        batch = next(run.splits.train)
        lone = StepData(iter([batch]), micro_batch_size=config.training.micro_batch_size)
        losses, loss_of = run.forward_step(lone, model)
        loss_of(losses)[0].backward()
        packed = [unit.grad_buffer.clone() for unit in model.units]
        model.zero_grad_buffer()
        rows = batch.laid_end_to_end()
        parts = []
        for first, last in zip(rows.cu_seqlens[:-1].tolist(), rows.cu_seqlens[1:].tolist(), strict=True):
            part = slice(first, last)
            positions = torch.arange(last - first)[None]
            parts.append(model(rows.tokens[:, part], positions, None, labels=rows.labels[:, part]))
            (parts[-1] * rows.loss_mask[:, part]).sum().backward()
        found["documents"] = len(parts)
        found["losses"] = float((losses - torch.cat(parts, dim=1)).detach().abs().max())
        separate = [unit.grad_buffer for unit in model.units]
        found["gradients"] = max(float((a - b).abs().max()) for a, b in zip(packed, separate, strict=True))
        found["size"] = max(float(gradient.abs().max()) for gradient in separate)
        model.zero_grad_buffer()
        model.train()

    flags = f"--fp64 --data-path {corpus} --micro-batch-size 4 --train-iters 3 --eval-iters 1 {DOCUMENTS}"
    train(flags, before=compare)
    assert found["documents"] > 6
    assert found["losses"] < 1e-12 and found["gradients"] < 1e-11 < 1e-2 < found["size"]


# ---------------------------------------------------------------------------------------------------------------------
# Number formats


@pytest.mark.slow_cases("", "--fp64", "--optimizer sgd")
@pytest.mark.parametrize("precision", ["", "--bf16", "--fp16 --initial-loss-scale 65536", "--fp64", "--optimizer sgd"])
def test_every_number_format_learns(corpus, precision, capsys):
    """Documents count upwards in strides of 1 to 3, which is soon learnt."""
    learning = "--lr 0.3" if "sgd" in precision else "--lr 2e-2"
    flags = f"--data-path {corpus} --micro-batch-size 4 --train-iters 50 --eval-iters 0 --hidden-dropout 0"
    outcome = train(f"{precision} {learning} {flags}")
    assert outcome.losses[0] == pytest.approx(math.log(41), rel=0.1)
    assert sum(outcome.losses[-5:]) / 5 < 0.65 * outcome.losses[0]
    assert capsys.readouterr().out.count("--fp16 on a CPU") == ("fp16" in precision)


@pytest.mark.slow
def test_replicas_stay_equal_run_after_run(corpus):
    """Runs two ranks many times in one pool of processes, with many formats and sizes."""
    formats = ["--bf16", "--fp16 --initial-loss-scale 65536", "--fp64 --hidden-size 48"]
    flags = [*formats, "--bf16 --overlap-grad-reduce", "--bf16"]
    runs = [f"{each} --data-path {corpus} --train-iters 3 --eval-iters 0" for each in flags]
    first, second = train_all_on_ranks(runs, 2)
    for one, other in zip(first, second, strict=True):
        assert differences(one.at_end, other.at_end) == []
        assert one.losses == other.losses
    assert differences(first[0].at_end, first[3].at_end) == []  # overlapped or not
    assert differences(first[0].at_end, first[4].at_end) == []  # independent of the runs before


# ---------------------------------------------------------------------------------------------------------------------
# How long, in which batches


def test_samples_instead_of_iterations(corpus):
    flags = f"--data-path {corpus} --micro-batch-size 4 --eval-iters 0"
    by_iterations = train(f"{flags} --train-iters 10 --lr-warmup-iters 2")
    by_samples = train(f"{flags} --train-samples 40 --lr-warmup-samples 8")
    assert by_samples.losses == by_iterations.losses
    assert differences(by_samples.at_end, by_iterations.at_end) == []


@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"])
def test_data_that_ends_within_a_step_is_said(corpus, layout):
    flags = f"--data-path {corpus} --train-iters 3 --eval-iters 0 --num-layers 4 {layout}"
    said = "the training data ended in iteration 2 of 3; lower --train-iters to 1 or give more data"
    if layout:
        # The rank that has no data says so at once; the other one waits for it.
        with Pool(2, patience=0.5) as pool, pytest.raises(AssertionError, match=said):
            pool.run(train_on_six_samples, 2, flags)
    else:
        with pytest.raises(UserError, match=said):
            train_on_six_samples(flags)


def train_on_six_samples(flags: str) -> None:
    def shorten(run: Trainer) -> None:
        if run.splits.train.micro_batches is not None:
            run.splits.train.micro_batches = itertools.islice(run.splits.train.micro_batches, 6)

    train(flags, before=shorten)


def test_a_growing_batch(tmp_path, corpus):
    """From 2 to 8 in steps of 2 over 24 samples: also across a restart."""
    flags = f"--data-path {corpus} --train-samples 44 --global-batch-size 8 --rampup-batch-size 2 2 24 --eval-iters 0"
    flags += " --micro-batch-size 2"
    straight = train(flags)
    sizes = [step.global_batch_size for step in straight.steps]
    assert sizes == [2] * 4 + [4] * 2 + [6] * 2 + [8] * ((44 - 28) // 8)
    assert stream([straight]) == list(range(sum(sizes)))
    first = train(f"{flags} --save {tmp_path} --load {tmp_path} --exit-interval 5")
    second = train(f"{flags} --save {tmp_path} --load {tmp_path}")
    assert first.losses + second.losses == straight.losses
    assert differences(second.at_end, straight.at_end) == []


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


class Watching:
    """The providers of GPT; records the inputs of evaluation."""

    def __init__(self) -> None:
        self.sums: list[tuple[float, float]] = []
        self.providers = Providers(GPT.build_model, GPT.build_datasets, self.build)

    def build(self, context: Context) -> ForwardStep:
        forward_step = GPT.build_forward_step(context)

        def watched(data: Any, model: Any) -> Any:
            losses, function = forward_step(data, model)
            (mask,) = function.args
            if not model.training:
                self.sums.append(((losses.double().view(-1) * mask.view(-1)).sum().item(), mask.sum().item()))
            return losses, function

        return watched


def evaluate_on_rank(flags: str) -> tuple[list[tuple[float, float]], Outcome]:
    watching = Watching()
    return watching.sums, train(flags, watching.providers)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_evaluation_is_the_mean_over_all_its_tokens(corpus, world_size):
    """By hand: sum of all losses over number of unmasked tokens, on one rank and on two."""
    flags = f"--fp64 --data-path {corpus} --train-iters 2 --eval-interval 1 --eval-iters 3 --split 60,30,10 {DOCUMENTS}"
    ranks = run_on_ranks(evaluate_on_rank, world_size, flags)
    by_rank = [sums for sums, _ in ranks]
    each = 3 * 4 // world_size  # micro-batches of an evaluation on a rank
    outcome = ranks[0][1]
    assert [record.split for record in outcome.validations] == ["validation", "validation", "test"]
    for number, record in enumerate(outcome.validations):
        part = [pair for sums in by_rank for pair in sums[number * each : (number + 1) * each]]
        total, count = sum(pair[0] for pair in part), sum(pair[1] for pair in part)
        assert record.losses["lm loss"] == pytest.approx(total / count, rel=1e-12)
        assert record.tokens == count < 12 * 16 and record.samples == 12
        means = [pair[0] / pair[1] for pair in part]
        assert record.losses["lm loss"] != pytest.approx(sum(means) / len(means), rel=1e-6)
    assert outcome.at_end["state"]["consumed_valid_samples"] == 2 * 12


def test_skip_train_evaluates_the_loaded_weights_and_saves_nothing(tmp_path, corpus):
    flags = f"--data-path {corpus} --eval-iters 2 --save {tmp_path} --load {tmp_path}"
    trained = train(f"{flags} --train-iters 3")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "metrics" not in path.name}
    evaluated = train(f"{flags} --skip-train")
    assert evaluated.steps == [] and [record.split for record in evaluated.validations] == ["validation", "test"]
    assert differences(evaluated.weights, trained.weights) == []
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in files.items())


def test_a_finished_run_is_not_trained_again(tmp_path, corpus):
    flags = f"--data-path {corpus} --train-iters 3 --eval-iters 1 --save {tmp_path} --load {tmp_path}"
    first, again = train(flags), train(flags)
    assert again.steps == [] and evaluations(again) == evaluations(first)


def test_no_evaluation_is_said(corpus, capsys):
    outcome = train(f"--data-path {corpus} --train-iters 2 --eval-interval 1 --eval-iters 0")
    assert outcome.validations == []
    assert "--eval-iters 0: nothing is evaluated, neither in between nor at the end" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"--skip-train.*--eval-iters 0.*nothing to do"):
        train(f"--data-path {corpus} --skip-train --eval-iters 0")


def test_evaluation_without_an_interval_comes_once_at_the_end(corpus, capsys):
    outcome = train(f"--data-path {corpus} --train-iters 2 --eval-iters 2")
    assert [(v.split, v.iteration, v.samples) for v in outcome.validations] == [("validation", 2, 8), ("test", 2, 8)]
    out = capsys.readouterr().out
    assert "without --eval-interval the validation data is looked at once, after the last iteration" in out
    assert "an evaluation takes 2 global batches, 8 samples, not a whole data set" in out


def test_an_empty_split_is_said(corpus, capsys):
    outcome = train(f"--data-path {corpus} --train-iters 2 --eval-iters 1 --split 90,10,0")
    assert [record.split for record in outcome.validations] == ["validation"]
    assert "there is no test data: no loss on it will be printed" in capsys.readouterr().out
    outcome = train(f"--data-path {corpus} --train-iters 2 --eval-iters 1 --split 100,0,0")
    assert outcome.validations == []
    assert "there is no validation and no test data" in capsys.readouterr().out
    with pytest.raises(UserError, match="--skip-train: there is no validation and no test data"):
        train(f"--data-path {corpus} --skip-train --eval-iters 1 --split 100,0,0")
    with pytest.raises(UserError, match="leaves no data for training"):
        train(f"--data-path {corpus} --train-iters 2 --eval-iters 1 --split 0,90,10")


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


def test_norms_and_zeros_are_those_of_weights_and_gradients(corpus):
    found: dict[str, Any] = {}

    def watch(run: Trainer) -> None:
        step = run.optimizer.step_on_device

        def watched(*inputs: Any) -> Any:
            slots = [(slot, unit) for unit in run.optimizer.units for slot in unit.slots]
            gradients = [slot.box_view_in(unit.grad_buffer) for slot, unit in slots]
            found["norm"] = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
            found["zeros"] = sum(int((gradient == 0).sum()) for gradient in gradients)
            assert float(grad_norm(run.optimizer.units, run.environment.groups)) == pytest.approx(found["norm"])
            return step(*inputs)

        run.optimizer.step_on_device = watched

    flags = "--train-iters 3 --eval-iters 0 --log-interval 3 --clip-grad 0.1 --max-position-embeddings 20"
    outcome = train(f"--data-path {corpus} {flags} --log-params-norm --log-num-zeros-in-grad", before=watch)
    weights = math.sqrt(sum(float(weight.double().square().sum()) for weight in outcome.weights.values()))
    line, last = outcome.lines[-1].step, outcome.steps[-1]
    assert line.params_norm == pytest.approx(weights, rel=1e-6) and outcome.steps[0].params_norm is None
    assert line.grad_norm == pytest.approx(found["norm"], rel=1e-6) and line.grad_norm > 0.1  # before clipping
    assert line.num_zeros == last.num_zeros == found["zeros"] > 0


def test_what_the_log_flags_promise(tmp_path, corpus, capsys):
    flags = f"--tensorboard-dir {tmp_path} --log-memory-to-tensorboard --log-timers-to-tensorboard --timing-log-level 2"
    train(f"--data-path {corpus} --train-iters 2 --eval-iters 1 --log-validation-ppl-to-tensorboard {flags}")
    (events,) = (path.read_bytes() for path in tmp_path.iterdir())
    for tag in (b"mem-host-resident-bytes", b"iteration-time", b"lm loss validation ppl", b"grad-norm vs samples"):
        assert tag in events
    printed = capsys.readouterr().out
    for part in ("model-and-optimizer-setup", "forward-compute", "batch-generator", "optimizer"):
        assert re.search(rf"    {part}:\.+ \(\d", printed), part


# ---------------------------------------------------------------------------------------------------------------------
# Setting up and closing


def test_another_model_than_the_checkpoints_is_refused_before_it_is_built(tmp_path):
    def build_model(*_: Any) -> Any:
        raise AssertionError("built")

    train(f"--mock-data --train-iters 1 --eval-iters 0 --save {tmp_path}")
    with pytest.raises(UserError, match=r"--norm-epsilon is 0\.1 in this run and 1e-05 in the checkpoint: give"):
        train(
            f"--mock-data --train-iters 2 --eval-iters 0 --load {tmp_path} --norm-epsilon 0.1",
            Providers(build_model, GPT.build_datasets, GPT.build_forward_step),
        )


def test_another_schedule_than_the_checkpoints_is_refused_before_the_model_is_built(tmp_path):
    def build_model(*_: Any) -> Any:
        raise AssertionError("built")

    def go_on(flags: str, **more: Any) -> None:
        parts = (build_model, GPT.build_datasets, GPT.build_forward_step)
        train(f"--mock-data --eval-iters 0 --load {tmp_path} {flags}", Providers(*parts, **more))

    train(f"--mock-data --train-iters 1 --eval-iters 0 --save {tmp_path}")
    told = r"--lr is 0\.5 in this run and .* in the checkpoint; --train-iters \(in samples\) is"
    with pytest.raises(UserError, match=told):
        go_on("--train-iters 2 --lr 0.5")
    for accepted in ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler", "--finetune"):
        with pytest.raises(AssertionError, match="built"):
            go_on(f"--train-iters 2 --lr 0.5 {accepted}")
    with pytest.raises(AssertionError, match="built"):  # the script's schedule need not be that of the flags
        go_on("--train-iters 2 --lr 0.5", build_scheduler=lambda *_: None)


def test_twice_in_one_process_with_other_sizes(corpus, monkeypatch):
    """Each run makes its process group and gives it back, under torchrun's environment."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    runs = []
    for size in (32, 48, 32):
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        runs.append(train(f"--hidden-size {size} --data-path {corpus} --train-iters 2 --eval-iters 0"))
        assert not dist.is_initialized()
    assert differences(runs[0].at_end, runs[2].at_end) == []
    widths = [run.weights["weight embedding.word_embeddings.weight"].numel() // 41 for run in runs]
    assert widths == [32, 48, 32]


def test_a_run_writes_nothing_into_its_model_config(corpus):
    """Neither functions nor other values, before or during training. Scripts may write functions; the app does not."""
    held = {}

    def keep(run):
        held["config"], held["before"] = run.config.transformer, dict(vars(run.config.transformer))

    train(f"--data-path {corpus} --train-iters 2 --eval-iters 1", before=keep)
    functions = ("finalize_model_grads_func", "grad_scale_func", "no_sync_func", "param_sync_func", "grad_sync_func")
    assert not any(held["before"][name] for name in functions)
    assert vars(held["config"]) == held["before"]
