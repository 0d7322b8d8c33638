"""Runs with a loss spike: the update is left out, or the run goes back to a checkpoint and leaves out the data."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import problems_of
from support.processes import run_on_ranks
from support.runs import GPT, Outcome, differences, train

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.exceptions import UserError
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.training.data.splits import Splits
from megatron.training.log.jsonl import read_metrics
from megatron.training.log.training_log import TrainingLog
from megatron.training.rewind_record import RECORD, RewindRecord
from megatron.training.trainer import Trainer

FLAGS = (
    "--mock-data --micro-batch-size 2 --train-iters 12 --eval-iters 0 --loss-spike-history 2 --loss-spike-z-score 1000"
)


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


@pytest.mark.fast("")
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


@pytest.mark.slow
def test_a_fine_tuned_run_goes_back_with_its_counts_and_optimizer(tmp_path):
    train(f"--mock-data --train-iters 2 --eval-iters 0 --save {tmp_path / 'first'}")
    flags = f"{FLAGS} --loss-spike-action rewind --loss-spike-rewind-window 3 --save-interval 2"
    flags += f" --load {tmp_path / 'first'} --finetune"
    found = train(f"{flags} --save {tmp_path / 'a'}", before=plant(8))
    without = train(f"{flags} --iterations-to-skip 6-8 --save {tmp_path / 'b'}")
    assert differences(found.at_end, without.at_end) == []


class Killed(RuntimeError):
    """Stands for a kill of the process."""


KILLED_AT = {
    "before the record": (RewindRecord, "write"),
    "before the tracker": (folders, "write_tracker"),
    "before temporary checkpoints are deleted": (folders, "delete"),
    "before the log": (TrainingLog, "go_back"),
    "before the data": (Splits, "close"),
    "before the first step": (Trainer, "begin_step"),
}
REWINDS_TO_3 = (
    f"{FLAGS} --loss-spike-action rewind --loss-spike-rewind-window 4 --save-interval 3 "
    "--non-persistent-save-interval 1"
)

"""Where a run that goes back is killed: before the call of a function."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A run that goes back from 8 to 3 and is not killed, and its folder."""
    folder = tmp_path_factory.mktemp("straight")
    return train(f"{REWINDS_TO_3} --save {folder}", before=plant(8)), folder


SLOW = ("before the log", "before the data", "before the first step")


@pytest.mark.fast("before the tracker")
@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=pytest.mark.slow) if place in SLOW else place for place in KILLED_AT]
)
def test_a_run_that_is_killed_while_it_goes_back_continues(straight, tmp_path, monkeypatch, capsys, place):
    """It goes back from 8 to 3; checkpoint 6 and temporary checkpoint 7 have learned from the window of 5 to 8."""
    owner, name = KILLED_AT[place]
    own = getattr(owner, name)

    def kill(*arguments: Any) -> Any:
        if going_back:
            raise Killed
        return own(*arguments)

    going_back: list[bool] = []

    def before(run: Trainer) -> None:
        plant(8)(run)
        reload = run.checkpoints.reload

        def watched(*arguments: Any) -> None:
            reload(*arguments)
            going_back.append(True)

        run.checkpoints.reload = watched  # type: ignore[method-assign]

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, kill)
        train(f"{REWINDS_TO_3} --save {tmp_path}", before=before)
    capsys.readouterr()
    decided = place != "before the record"
    resumed = train(f"{REWINDS_TO_3} --save {tmp_path} --load {tmp_path}", before=plant(*[] if decided else [8]))
    assert ("the data of iterations 5 to 8 is left out" in capsys.readouterr().out) and resumed.decision is None
    assert differences(resumed.at_end, straight[0].at_end) == []
    lines = [read_metrics(folder / "metrics.jsonl").training for folder in (straight[1], tmp_path)]
    assert [line["lm loss"] for line in lines[0]] == [line["lm loss"] for line in lines[1]]
    kept = [find_checkpoint(folder).manifest.common["rewinds"] for folder in (straight[1], tmp_path)]
    assert kept == [[{"spike": 8, "iteration": 3, "first": 5}]] * 2


@pytest.mark.slow
def test_a_run_that_goes_back_into_another_folder_writes_its_own(tmp_path, capsys):
    """It was loaded from a/4 and goes back from 8 to that. A later run knows b alone, where 6 has learned from 5 to
    8."""
    flags = f"{FLAGS} --loss-spike-action rewind --loss-spike-rewind-window 4 --save-interval 2"
    train(f"{flags} --save {tmp_path / 'a'} --exit-interval 4")
    straight = train(f"{flags} --load {tmp_path / 'a'} --save {tmp_path / 'b'}", before=plant(8))
    with pytest.raises(Killed):
        train(f"{flags} --load {tmp_path / 'a'} --save {tmp_path / 'c'}", before=dies_after_going_back(8))
    capsys.readouterr()
    resumed = train(f"{flags} --load {tmp_path / 'c'} --save {tmp_path / 'c'}")
    assert "loaded checkpoint of iteration       4" in capsys.readouterr().out
    assert differences(resumed.at_end, straight.at_end) == []


def test_no_checkpoint_from_before_an_earlier_decision_is_gone_back_to(tmp_path, capsys):
    """The first spike, in 8, leaves 7 and 8 out. Checkpoint 7 of the time before, written by an exit, has learned from
    7; the second spike, in 10, must not go back to it."""
    flags = f"{FLAGS} --loss-spike-action rewind --loss-spike-rewind-window 2 --save {tmp_path} --load {tmp_path}"
    train(f"{flags} --save-interval 5 --exit-interval 7")
    train(f"{flags} --save-interval 5", before=plant(8, 10))
    out = capsys.readouterr().out
    assert "from the loss spike in iteration 8 to iteration 5" in out
    assert "from the loss spike in iteration 10 to iteration 5" in out
    stale = rf"to continue from: iter_0000007: it has learned from data .* \({tmp_path}/rewinds.json; delete this file"
    with pytest.raises(UserError, match=stale):
        for folder in tmp_path.glob("iter_*"):
            if folder.name != "iter_0000007":
                shutil.rmtree(folder)
        train(f"{flags} --save-interval 5")


@pytest.mark.slow
def test_windows_stay_without_the_flag_and_a_new_run_forgets_them(tmp_path, capsys):
    flags = f"{FLAGS} --loss-spike-rewind-window 2 --save-interval 2 --save {tmp_path}"
    with pytest.raises(Killed):
        train(f"{flags} --loss-spike-action rewind", before=dies_after_going_back(8))
    flags = f"--mock-data --train-iters 12 --eval-iters 0 --save {tmp_path}"
    found = train(f"{flags} --load {tmp_path}")
    assert found.at_end["state"]["skipped_train_samples"] == 8
    found = train(flags)
    assert found.at_end["state"]["skipped_train_samples"] == 0 and not (tmp_path / RECORD).exists()
    assert "rewinds.json is deleted: it is of an earlier run" in capsys.readouterr().out


def dies_after_going_back(spike: int) -> Any:
    """Returns a change of a run: this iteration is a spike, and the first step after the run went back is its end."""

    def change(run: Trainer) -> None:
        plant(spike)(run)
        begin = run.begin_step

        def begin_step() -> int:
            if len(run.checkpoints.record.rewinds):
                raise Killed
            return begin()

        run.begin_step = begin_step  # type: ignore[method-assign]

    return change


def test_without_an_old_checkpoint_or_after_many_rewinds_the_run_ends(tmp_path):
    flags = f"{FLAGS} --loss-spike-action rewind --save-interval 2"
    found = train(f"{flags} --loss-spike-rewind-window 6 --save {tmp_path / 'a'}", before=plant(7))
    assert found.decision is not None and found.decision.exit_code == 1
    assert "there is no checkpoint of an iteration before 2 to go back to" in found.decision.message
    limited = f"{flags} --loss-spike-rewind-window 1 --loss-spike-limit 1 --save {tmp_path / 'b'}"
    found = train(limited, before=plant(5, 9))
    assert found.decision is not None and "1 rewinds before it" in found.decision.message


@pytest.mark.slow
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
    assert outcome.decision is None
    return run.checkpoints.record.rewinds.windows[0], outcome.at_end["state"]["skipped_train_samples"]


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


def test_a_new_run_does_not_go_back_to_a_checkpoint_of_an_earlier_run(tmp_path, capsys):
    """The folder of --save has checkpoint 3 of another run, which began with other weights. Without --load this run is
    a new one, and has no checkpoint before its first save."""
    train(f"{FLAGS} --seed 5 --save {tmp_path} --save-interval 3 --exit-interval 3")
    flags = f"{FLAGS} --loss-spike-action rewind --loss-spike-rewind-window 2 --save {tmp_path} --save-interval 7"
    capsys.readouterr()
    found = train(flags, before=plant(6))
    assert found.decision is not None and "no checkpoint of an iteration before 5" in found.decision.message
    assert (
        f"WARNING: --save {tmp_path} has checkpoints of an earlier run, up to iteration 3, and this run does not "
        "continue from them. If it ends before its first save, a later --load of this folder continues the earlier run"
    ) in capsys.readouterr().out
    # After its first save a resume continues from that one. It does not take checkpoint 3 for its own either.
    flags = flags.replace("--save-interval 7", "--save-interval 4")
    train(f"{flags} --exit-interval 4")
    found = train(f"{flags} --load {tmp_path}", before=plant(5))
    printed = capsys.readouterr().out
    assert found.decision is not None and "no checkpoint of an iteration before 4" in found.decision.message
    assert printed.count("WARNING: --save") == 1 and "loaded checkpoint of iteration       4" in printed
