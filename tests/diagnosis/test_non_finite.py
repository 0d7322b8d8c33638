"""A loss or gradient that is not finite: named, then stopped at or skipped, as flagged."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launch import launch
from support.processes import run_on_ranks
from support.runs import GPT, Outcome, differences, train
from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.diagnosis.non_finite import read_batches
from megatron.diagnosis.replay import read_dump, replay
from megatron.training import pretrain
from megatron.training.hooks.exit import ExitReason
from megatron.training.log.non_finite_search import FORWARD, in_order
from megatron.training.providers import Context, ForwardStep, Providers

RUN = "--eval-iters 0"


class _BadGradient(torch.autograd.Function):
    """The input; an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


def with_losses(change: Callable[[Context, Any, Tensor], Tensor]) -> Providers:
    """GPT whose losses are changed by a function of the context and the step's data."""

    def build(context: Context) -> ForwardStep:
        forward_step = GPT.build_forward_step(context)

        def step(data: Any, model: Any) -> Any:
            losses, function = forward_step(data, model)
            return change(context, data, losses), function

        return step

    return Providers(GPT.build_model, GPT.build_datasets, build)


def poisoned(kind: str, iteration: int, micro_batch: int, rank: int = 0) -> Providers:
    """GPT whose loss or gradient is infinite in one micro-batch (from 0) of one iteration (from 1) on one rank."""

    def change(context: Context, data: Any, losses: Any) -> Any:
        here = data.iteration + 1, len(data.sample_ids) - 1, context.environment.rank
        if here != (iteration, micro_batch, rank):
            return losses
        return losses * torch.inf if kind == "loss" else _BadGradient.apply(losses)

    return with_losses(change)


def named(outcome: Outcome) -> list[str]:
    return [event.facts["what"] for event in outcome.events if event.name == "non-finite"]


@pytest.mark.slow_cases("-loss-lm loss is inf", "-gradient-gradient at the embedding is not finite")
@pytest.mark.parametrize(
    ("kind", "what"), [("loss", "lm loss is inf"), ("gradient", "gradient at the embedding is not finite")]
)
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_it_stops_and_is_named(corpus, kind, what, precision, capsys):
    """Weights and optimizer stay at the iteration before."""
    flags = f"{RUN} --data-path {corpus} {precision} --train-iters 9 --log-interval 1"
    before = train(f"{flags} --exit-interval 2")
    stopped = train(flags, poisoned(kind, iteration=3, micro_batch=2))
    assert stopped.decision.reason is ExitReason.NON_FINITE and stopped.decision.exit_code == 1
    assert named(stopped)[0] == f"rank 0, iteration 3: {what} in micro-batch 2, samples [10]"
    assert f"non-finite: {named(stopped)[0]}\n" in capsys.readouterr().err
    assert set(differences(stopped.at_end, before.at_end)) == {"state"}
    assert stopped.at_end["state"]["iteration"] == 3


def stop_on_rank_1(corpus: str, kind: str, last: int, folder: str) -> Outcome:
    assert dist.get_world_size() == 2
    flags = f"{RUN} --data-path {corpus} --train-iters {last} --save {folder} --save-interval 1"
    return train(flags, poisoned(kind, iteration=3, micro_batch=1, rank=1))


@pytest.mark.slow_cases("loss-9")
@pytest.mark.parametrize(("kind", "last"), [("loss", 9), ("gradient", 3)])
def test_one_of_two_ranks_stops_both(corpus, tmp_path, kind, last):
    """No checkpoint is saved of the bad iteration, although one is due after each iteration, also after the last."""
    ranks = run_on_ranks(stop_on_rank_1, 2, corpus, kind, last, str(tmp_path))
    for rank in ranks:
        assert rank.decision is not None and rank.decision.reason is ExitReason.NON_FINITE
        assert rank.at_end["state"]["iteration"] == 3
    assert differences(ranks[0].at_end, ranks[1].at_end) == []
    assert named(ranks[1])[0].startswith("rank 1, iteration 3: ")
    assert named(ranks[1])[0].endswith("in micro-batch 1, samples [11]")  # 8 before, then ranks in turn
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert not list(tmp_path.glob("iter_0000003*"))


def stop_without_saving(corpus: str) -> tuple[Outcome, Outcome]:
    flags = f"{RUN} --data-path {corpus} --train-iters 9"
    return train(f"{flags} --exit-interval 2"), train(flags, poisoned("loss", iteration=3, micro_batch=1, rank=1))


@pytest.mark.slow
def test_the_step_until_all_ranks_know_changes_nothing(corpus):
    """The other rank learns of it one step later; no rank updates weights in between."""
    for before, stopped in run_on_ranks(stop_without_saving, 2, corpus):
        assert stopped.decision.reason is ExitReason.NON_FINITE and stopped.at_end["state"]["iteration"] == 4
        assert differences(stopped.at_end, before.at_end) == ["state"]


def stop_in_a_pipeline(corpus: str, kind: str, layout: str, loss_rank: int) -> Outcome:
    flags = f"{RUN} --data-path {corpus} --train-iters 9 --log-interval 1 {layout}"
    return train(flags, poisoned(kind, iteration=3, micro_batch=2, rank=loss_rank))


PIPELINES = {
    "1f1b": ("--pipeline-model-parallel-size 2", 1),
    "zb-v": ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers 4", 0),
}


@pytest.mark.fast("loss-1f1b", "gradient-zb-v")
@pytest.mark.parametrize("schedule", PIPELINES)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_stages_stop_together_and_each_names_what_it_saw(corpus, kind, schedule):
    """The loss on the stage that computes it, the gradient where it reaches the embedding; in the same micro-batch."""
    layout, loss_rank = PIPELINES[schedule]
    ranks = run_on_ranks(stop_in_a_pipeline, 2, corpus, kind, layout, loss_rank)
    for rank in ranks:
        assert rank.decision is not None and rank.decision.reason is ExitReason.NON_FINITE
        assert rank.at_end["optimizer"]["update_count"] == 2
    where = "in micro-batch 2, samples [10]"
    assert named(ranks[0])[0].endswith(where) and named(ranks[0])[0].startswith("rank 0, iteration 3: ")
    if kind == "loss":
        assert named(ranks[loss_rank])[0].startswith(f"rank {loss_rank}, iteration 3: lm loss is ")
    else:
        assert named(ranks[0])[0] == f"rank 0, iteration 3: gradient at the embedding is not finite {where}"


def stop_tensor_parallel_ranks(corpus: str) -> Outcome:
    flags = f"{RUN} --data-path {corpus} --train-iters 9 --tensor-model-parallel-size 2"
    return train(flags, poisoned("loss", iteration=3, micro_batch=2, rank=dist.get_rank()))


@pytest.mark.slow
def test_tensor_parallel_ranks_name_it_once(corpus):
    first, second = run_on_ranks(stop_tensor_parallel_ranks, 2, corpus)
    assert named(first)[0] == "rank 0, iteration 3: lm loss is inf in micro-batch 2, samples [10]"
    assert named(second) == [] and second.decision == first.decision


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_it_is_skipped_counted_and_survived(corpus, kind):
    flags = (
        f"{RUN} --data-path {corpus} --train-iters 4 --log-interval 4 --nonfinite-action skip --lr-decay-style constant"
    )
    outcome = train(flags, poisoned(kind, iteration=2, micro_batch=0))
    assert outcome.decision is None
    assert [step.applied for step in outcome.steps] == [True, False, True, True]
    line = outcome.lines[-1]
    assert line.skipped_iterations == 1 and line.nan_iterations == (kind == "loss")
    assert outcome.at_end["scheduler"]["num_steps"] == 3 * 4
    assert outcome.at_end["optimizer"]["update_count"] == 3
    assert outcome.at_end["state"]["consumed_train_samples"] == 4 * 4
    assert all(weight.isfinite().all() for weight in outcome.weights.values())
    assert named(outcome)[0].startswith("rank 0, iteration 2: ")


def test_an_overflow_of_float16_is_no_accident_but_a_loss_is(corpus):
    flags = f"{RUN} --data-path {corpus} --fp16 --train-iters 4 --log-interval 1 --hysteresis 1"
    overflowing = train(flags)  # the first scale, 2^32, is far too large
    assert overflowing.decision is None and named(overflowing) == []
    assert not overflowing.steps[0].applied and overflowing.steps[-1].loss_scale < 2**32
    stopped = train(f"{flags} --initial-loss-scale 1024", poisoned("loss", iteration=2, micro_batch=0))
    assert stopped.decision.reason is ExitReason.NON_FINITE and "iteration 2: lm loss is inf" in named(stopped)[0]


def overflow_in_layouts(corpus: str, layouts: list[str]) -> list[Outcome]:
    return [train(f"{OVERFLOWING} --data-path {corpus} {layout}") for layout in layouts]


OVERFLOWING = f"{RUN} --fp16 --train-iters 6 --log-interval 1 --hysteresis 1 --initial-loss-scale 8388608"


def test_all_ranks_of_a_layout_skip_the_same_updates(corpus):
    """Gradients overflow on one stage, or one tensor parallel rank, before they do on another."""
    alone = train(f"{OVERFLOWING} --data-path {corpus}")
    layouts = [PIPELINES["1f1b"][0], "--tensor-model-parallel-size 2", "--use-distributed-optimizer"]
    for outcomes in run_on_ranks(overflow_in_layouts, 2, corpus, layouts):
        for outcome in outcomes:
            assert [step.applied for step in outcome.steps] == [step.applied for step in alone.steps]
            assert [step.loss_scale for step in outcome.steps] == [step.loss_scale for step in alone.steps]
            assert outcome.at_end["optimizer"] == alone.at_end["optimizer"]
    assert {step.applied for step in alone.steps} == {True, False}


def test_a_poisoned_weight(corpus, tmp_path):
    """A weight that is NaN stops the run in its first iteration."""

    def spoil(run: Any) -> None:
        run.optimizer.units[1].param_buffer[5] = torch.nan

    outcome = train(f"{RUN} --data-path {corpus} --train-iters 5 --save {tmp_path}", before=spoil)
    assert outcome.decision.reason is ExitReason.NON_FINITE and outcome.at_end["state"]["iteration"] == 1
    assert len(named(outcome)) == 4 and not list(tmp_path.glob("iter_*"))


# Updates that are skipped for ever --------------------------------------------------------------------------------


def spoiled_weight(iteration: int) -> Providers:
    """GPT of which a weight becomes NaN in an iteration (from 1)."""

    def build(context: Context) -> ForwardStep:
        forward_step = GPT.build_forward_step(context)

        def step(data: Any, model: Any) -> Any:
            if data.iteration + 1 == iteration:
                model.units[1].param_buffer[5] = torch.nan
            return forward_step(data, model)

        return step

    return Providers(GPT.build_model, GPT.build_datasets, build)


def folders_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("iter_*"))


@pytest.mark.parametrize("more", ["", pytest.param("--async-save", marks=pytest.mark.slow)])
def test_a_run_that_only_skips_ends_and_its_last_finite_checkpoint_stays(corpus, tmp_path, capsys, more):
    flags = (
        f"{RUN} --data-path {corpus} --train-iters 20 --lr-decay-iters 20 --nonfinite-action skip "
        "--max-consecutive-skips 3 "
        f"--save {tmp_path} --load {tmp_path} --save-interval 1 --keep-last 1 {more}"
    )
    ended = train(flags, spoiled_weight(3))
    assert ended.decision.reason is ExitReason.SKIPPED_UPDATES and ended.decision.exit_code == 1
    assert ended.at_end["state"]["iteration"] == 5
    assert folders_in(tmp_path) == ["iter_0000002", "iter_0000004"]
    said = capsys.readouterr().out
    assert "kept iter_0000002: weights of newer checkpoints are not finite" in said
    assert "skipped updates in a row (--max-consecutive-skips) (iteration 5)" in said
    resumed = train(f"{flags} --train-iters 6")
    assert "iter_0000004 is left out: its weights are not all finite (--ckpt-step 4" in capsys.readouterr().out
    assert resumed.at_start["state"]["iteration"] == 2 and resumed.decision is None
    assert all(weight.isfinite().all() for weight in resumed.weights.values())
    assert folders_in(tmp_path) == ["iter_0000006"]


def test_skips_with_updates_between_them_do_not_end_a_run(corpus):
    flags = f"{RUN} --data-path {corpus} --train-iters 7 --nonfinite-action skip --max-consecutive-skips 2"
    providers = with_losses(lambda context, data, losses: losses * (torch.inf if data.iteration % 2 else 1.0))
    outcome = train(flags, providers)
    assert outcome.decision is None and sum(not step.applied for step in outcome.steps) == 3


@pytest.mark.parametrize(("smallest", "ends"), [(1.0, None), (2.0**29, 5)])
def test_overflows_count_once_the_loss_scale_is_the_smallest(corpus, smallest, ends):
    """The scale falls from 2^32. At 2^29, after three falls, the gradients still overflow."""
    flags = f"{RUN} --data-path {corpus} --fp16 --train-iters 8 --hysteresis 1 --min-loss-scale {smallest}"
    outcome = train(f"{flags} --max-consecutive-skips 2")
    assert (outcome.decision is None) is (ends is None)
    if outcome.decision is not None:
        assert outcome.decision.reason is ExitReason.SKIPPED_UPDATES
        assert outcome.at_end["state"]["iteration"] == ends


def test_the_hysteresis_may_be_longer_than_the_limit(corpus):
    flags = f"{RUN} --data-path {corpus} --fp16 --train-iters 6 --hysteresis 5 --max-consecutive-skips 2"
    assert train(flags).decision is None


def pretrain_poisoned() -> None:
    pretrain(poisoned("loss", iteration=2, micro_batch=1))


def test_the_exit_code_is_1(corpus, tmp_path):
    program = launch(f"{RUN} --data-path {corpus} --train-iters 5", 0, tmp_path, pretrain_poisoned)
    assert program.exit_codes() == [1]
    assert "non-finite: rank 0, iteration 2: lm loss is inf in micro-batch 1, samples [5]" in program.output(0)
    assert "exiting program after a non-finite loss or gradient (iteration 2)" in program.output(0)


# The step that ended a run: written, and computed again --------------------------------------------------------------


def overflow_in_layer_1(run: Any) -> None:
    """Makes weights of layer 1 so large that its MLP overflows: finite weights, infinite outputs."""
    for chunk in run.model:
        for weights in chunk.weight_chunks():
            if weights.name == "decoder.layers.1.mlp.linear_fc2.weight":
                weights.flat.fill_(3e38)
    run.optimizer.reload_model_params()


def reports(capsys: Any) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "computed again" in line]


def test_the_layer_is_named_and_the_step_is_written(corpus, tmp_path, capsys):
    """The state is that before the step, and the second computation changes neither weights nor counts."""
    flags = f"{RUN} --data-path {corpus} --train-iters 5"
    dump = tmp_path / "dump"
    stopped = train(f"{flags} --nonfinite-dump-dir {dump}", before=overflow_in_layer_1)
    (line,) = reports(capsys)
    assert line.startswith(
        "iteration 1 was computed again; first non-finite: rank 0: output of decoder.layers.1.mlp.linear_fc2 in "
        "micro-batch 0, samples [0]: "
    )
    assert stopped.at_end["state"]["iteration"] == 1
    manifest = find_checkpoint(dump / "iteration_0000001", None).manifest
    assert manifest.iteration == 0 and manifest.common["train_state"]["consumed_train_samples"] == 0
    batches = read_batches(dump / "iteration_0000001" / "batch_dp_00000.safetensors")
    assert [batch.sample_ids.tolist() for batch in batches] == stopped.sample_ids[0]
    assert next(event.facts["first"] for event in stopped.events if event.name == "non-finite-search") in line


def test_without_a_folder_it_is_named_only_and_a_passing_fault_is_told(corpus, tmp_path, capsys):
    """A fault of the first computation alone: nothing is found in the second."""
    flags = f"{RUN} --data-path {corpus} --train-iters 5 --log-interval 1"
    faults = []

    def once(context: Context, data: Any, losses: Tensor) -> Tensor:
        if data.iteration != 2 or faults:
            return losses
        faults.append(losses)
        return losses * torch.inf

    stopped = train(flags, with_losses(once))
    assert stopped.decision.reason is ExitReason.NON_FINITE
    out = capsys.readouterr().out
    assert "the step is not written: neither --save nor --nonfinite-dump-dir is given" in out
    assert "iteration 3 was computed again, and everything was finite" in out
    train(f"{flags} --save {tmp_path} --save-interval 9 --exit-interval 2")
    assert not (tmp_path / "nonfinite").exists()


def find_in_layout(corpus: str, layout: str, folder: str) -> tuple[Outcome, str]:
    flags = f"{RUN} --data-path {corpus} --train-iters 5 --save {folder} {layout}"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        outcome = train(flags, before=overflow_in_layer_1)
    return outcome, printed.getvalue()


@pytest.mark.slow_cases(
    "--use-distributed-optimizer-rank 0: output of decoder.layers.1.mlp.linear_fc2 in micro-batch 0, samples"
)
@pytest.mark.parametrize(
    ("layout", "where"),
    [
        (PIPELINES["1f1b"][0], "rank 1: output of decoder.layers.1.mlp.linear_fc2 in micro-batch 0, samples [0]"),
        ("--use-distributed-optimizer", "rank 0: output of decoder.layers.1.mlp.linear_fc2 in micro-batch 0, samples"),
    ],
)
def test_a_layout_names_rank_and_layer_and_one_process_repeats_it(corpus, tmp_path, layout, where):
    ranks = run_on_ranks(find_in_layout, 2, corpus, layout, str(tmp_path))
    printed = "".join(text for _, text in ranks)
    assert f"first non-finite: {where}" in printed
    assert {rank.decision.reason for rank, _ in ranks} == {ExitReason.NON_FINITE}
    dump = read_dump(tmp_path / "nonfinite" / "iteration_0000001")
    assert [batch.sample_ids.tolist() for batch in dump.batches] == [[0], [1], [2], [3]]
    result = replay(dump, GPT)
    first = in_order(result.findings)[0]
    assert (first.phase, first.name, first.microbatch) == (FORWARD, "decoder.layers.1.mlp.linear_fc2", 0)
    assert len(result.losses) == 4
