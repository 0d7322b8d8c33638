"""Runs with a loss spike: the update is left out, or the run goes back to a checkpoint and leaves out the data."""

import dataclasses
from typing import Any

import pytest
from support.command_lines import problems_of
from support.processes import run_on_ranks
from support.runs import GPT, Outcome, differences, train

from megatron.core.exceptions import UserError
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.training.logging.jsonl import read_metrics
from megatron.training.trainer import Trainer

FLAGS = "--mock-data --train-iters 12 --eval-iters 0 --loss-spike-history 2 --loss-spike-z-score 1000"


def plant(*iterations: int) -> Any:
    """Returns a change of a run: these iterations report a loss that is 1e6 larger."""

    def change(run: Trainer) -> None:
        spikes = run.spikes
        assert spikes is not None
        judge, loss = spikes.judge, spikes._loss_of_step

        def watched(reports: Any, iteration: int) -> Any:
            spikes._loss_of_step = lambda reports: loss(reports) + 1e6 * (iteration in iterations)  # type: ignore
            return judge(reports, iteration)

        spikes.judge = watched  # type: ignore[method-assign]

    return change


def applied(outcome: Outcome) -> list[tuple[int, bool]]:
    return [(step.iteration, step.applied) for step in outcome.steps]


def test_the_update_of_a_spike_is_left_out(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    found = train(f"{FLAGS} --loss-spike-action skip --metrics-path {path}", before=plant(6))
    assert applied(found) == [(number, number != 6) for number in range(1, 13)] and found.decision is None
    assert [event.facts.keys() for event in found.events if event.name == "loss-spike"] == [{"loss", "z_score"}]
    assert "loss spike: iteration 6: lm loss" in capsys.readouterr().out
    scores = dict(zip(*read_metrics(path).series("loss z-score"), strict=True))
    assert scores.keys() == set(range(3, 13)) and scores[6] > 1000 > scores[7]


def test_too_many_spikes_in_a_row_end_the_run(tmp_path):
    flags = f"{FLAGS} --loss-spike-action skip --loss-spike-limit 2 --save {tmp_path} --save-interval 4"
    found = train(flags, before=plant(5, 7, 8))
    assert found.decision is not None and found.decision.exit_code == 1
    assert "2 loss spikes in a row, the last in iteration 8 (--loss-spike-limit)" in found.decision.message
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000004"]  # not that of iteration 8


@pytest.mark.parametrize("saves", ["", "--async-save"])
def test_a_rewound_run_is_one_without_the_data(tmp_path, capsys, saves):
    """It goes back to iteration 4, the newest before the window of 6 to 8, and leaves that window out."""
    flags = f"{FLAGS} --loss-spike-action rewind --loss-spike-rewind-window 3 --save-interval 2 {saves}"
    found = train(f"{flags} --save {tmp_path}", before=plant(8))
    assert "went back from the loss spike in iteration 8 to iteration 4; the data of iterations 6 to 8" in (
        capsys.readouterr().out
    )
    without = train(f"{flags} --iterations-to-skip 6-8 --save {tmp_path / 'other'}")
    assert found.decision is None and differences(found.at_end, without.at_end) == []
    assert found.at_end["state"]["skipped_train_samples"] == 12
    history = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in history.training] == [1, 2, 3, 4, 5, 9, 10, 11, 12]
    assert [event for event in history.events if event["event"] == "rewind"] == [
        {"iteration": 4, "event": "rewind", "spike": 8, "left_out": [6, 8]}
    ]
    # A run that is resumed from a later checkpoint remembers, and one from an earlier one decides alike.
    again = train(f"{flags} --load {tmp_path} --save {tmp_path} --ckpt-step 10", before=plant(8))
    assert differences(again.at_end, found.at_end) == [] and len(again.steps) == 2


def test_a_fine_tuned_run_goes_back_with_its_counts_and_optimizer(tmp_path):
    train(f"--mock-data --train-iters 2 --eval-iters 0 --save {tmp_path / 'first'}")
    flags = f"{FLAGS} --loss-spike-action rewind --loss-spike-rewind-window 3 --save-interval 2"
    flags += f" --load {tmp_path / 'first'} --finetune"
    found = train(f"{flags} --save {tmp_path / 'a'}", before=plant(8))
    without = train(f"{flags} --iterations-to-skip 6-8 --save {tmp_path / 'b'}")
    assert differences(found.at_end, without.at_end) == []


def test_a_run_that_is_killed_after_it_went_back_continues_there(tmp_path, capsys):
    """It goes back from 8 to 3. Checkpoint 6 and temporary checkpoint 7 have data that is left out."""
    flags = f"{FLAGS} --loss-spike-action rewind --loss-spike-rewind-window 4 --save-interval 3 --save {tmp_path}"
    flags += f" --non-persistent-save-interval 1 --load {tmp_path}"

    def killed(run: Trainer) -> None:
        plant(8)(run)
        begin = run.begin_step

        def begin_step() -> int:
            if run.spikes is not None and run.spikes.left_out:
                raise RuntimeError("killed")
            return begin()

        run.begin_step = begin_step  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="killed"):
        train(flags, before=killed)
    capsys.readouterr()
    train(flags)  # without a spike: nothing goes back any more
    assert "loaded checkpoint of iteration       3" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "non_persistent").glob("iter_*")] == ["iter_0000011"]


def test_without_an_old_checkpoint_or_after_many_rewinds_the_run_ends(tmp_path):
    flags = f"{FLAGS} --loss-spike-action rewind --save-interval 2"
    found = train(f"{flags} --loss-spike-rewind-window 6 --save {tmp_path / 'a'}", before=plant(7))
    assert found.decision is not None and found.decision.exit_code == 1
    assert "there is no checkpoint of an iteration before 2 to go back to" in found.decision.message
    limited = f"{flags} --loss-spike-rewind-window 1 --loss-spike-limit 1 --save {tmp_path / 'b'}"
    found = train(limited, before=plant(5, 9))
    assert found.decision is not None and "1 rewinds before it" in found.decision.message


def test_ranks_without_the_loss_decide_alike(tmp_path):
    """Two stages: only the last one computes the loss."""
    flags = f"{FLAGS} --loss-spike-action rewind --loss-spike-rewind-window 2 --save-interval 2 --save {tmp_path}"
    first, last = run_on_ranks(_on_rank, 2, f"{flags} --pipeline-model-parallel-size 2")
    assert first == last == ((7, 8), 8)


def _on_rank(flags: str) -> Any:
    kept: list[Trainer] = []

    def before(run: Trainer) -> None:
        kept.append(run)
        plant(8)(run)

    outcome = train(flags, before=before)
    (run,) = kept
    assert run.spikes is not None and outcome.decision is None
    return run.spikes.left_out[0], outcome.at_end["state"]["skipped_train_samples"]


def test_an_optimizer_that_cannot_leave_out_an_update_is_refused():
    class Own(FlatOptimizer):
        update_only_if = MegatronOptimizer.update_only_if

    def build(context: Any, model: Any) -> Any:
        return Own(context.config.optimizer, model, context.environment.groups)

    providers = dataclasses.replace(GPT, build_optimizer=build)
    with pytest.raises(UserError, match="--loss-spike-action: Own is the script's own"):
        train(f"{FLAGS} --loss-spike-action skip", providers)


def test_going_back_needs_checkpoints():
    assert problems_of("--loss-spike-action rewind") == [
        "--loss-spike-action rewind goes back to a checkpoint: give --save and --save-interval"
    ]
    flags = "--loss-spike-action rewind --save x --save-interval 2 --no-save-optim"
    assert problems_of(flags)[0].startswith("--loss-spike-action rewind loads the optimizer's state: leave out")
