"""When a run evaluates, saves and exits, with fake parts that record their calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.data.loaders import WorkerCrashed
from megatron.training.data.step_data import StepData
from megatron.training.hooks.exit import ExitDecision, ExitReason
from megatron.training.launch.heartbeat import Progress
from megatron.training.rewind_record import Rewind, Rewinds
from megatron.training.state import TrainState
from megatron.training.trainer import Trainer

SAVING = ExitDecision(ExitReason.SIGNAL, "exiting after SIGTERM", 0, save=True)
UNSAVED = ExitDecision(ExitReason.NON_FINITE, "exiting after a loss of NaN", 1, save=False)


def trainer(
    iteration: int = 4,
    *,
    save: str | None = "folder",
    save_interval: int | None = 2,
    temporary: int | None = None,
    eval_interval: int | None = 2,
    start: int | None = None,
    valid: Any = "data",
    decisions: tuple[ExitDecision | None, ExitDecision | None] = (None, None),
    calls: list[str] | None = None,
) -> Trainer:
    """A run after so many of 10 iterations. `decisions`: after the step, and once all ranks have answered."""
    noted = [] if calls is None else calls
    config = SimpleNamespace(
        training=SimpleNamespace(train_iters=10, iterations_to_skip=[6, "8-9"]),
        checkpoint=SimpleNamespace(save=save, save_interval=save_interval, non_persistent_save_interval=temporary),
        evaluation=SimpleNamespace(eval_interval=eval_interval, skip_train=False, start_eval_at_iter=start),
    )
    log = SimpleNamespace(
        flush=lambda: noted.append("flush"),
        close=lambda: noted.append("log.close"),
        close_writers=lambda: noted.append("close_writers"),
        event=lambda name, iteration, **facts: noted.append(f"{name} {facts}"),
    )
    exit = SimpleNamespace(
        after_step=lambda iteration: decisions[0],
        resolve_pending=lambda: decisions[1],
        close=lambda: noted.append("exit.close"),
    )
    parts: dict[str, Any] = dict.fromkeys(
        ("model", "optimizer", "scheduler", "batches", "forward_backward", "forward_step")
    )
    return Trainer(
        config=config,  # type: ignore[arg-type]
        environment=SimpleNamespace(  # type: ignore[arg-type]
            logs=True, rank=1, world_size=2, device="cpu", progress=Progress(), heartbeat=None
        ),
        state=SimpleNamespace(iteration=iteration),  # type: ignore[arg-type]
        splits=SimpleNamespace(valid=valid, close=lambda: noted.append("data.close")),  # type: ignore[arg-type]
        log=log,  # type: ignore[arg-type]
        hooks=SimpleNamespace(attach=lambda run: None, on_exit=lambda iteration: noted.append("on_exit")),  # type: ignore[arg-type]
        exit=exit,  # type: ignore[arg-type]
        checkpoints=SimpleNamespace(  # type: ignore[arg-type]
            last_saved=None,
            finish_save=lambda: noted.append("finish_save"),
            leave_save=lambda: noted.append("leave_save"),
            close=lambda is_complete: noted.append(f"checkpoints.close {is_complete}"),
            record=SimpleNamespace(rewinds=Rewinds()),
        ),
        **parts,
    )


def test_saves_are_due_by_interval_or_because_of_an_exit_and_once() -> None:
    assert trainer(4).save_is_due(None) and not trainer(5).save_is_due(None)
    assert trainer(5).save_is_due(SAVING) and not trainer(4).save_is_due(UNSAVED)
    assert not trainer(4, save=None).save_is_due(SAVING) and not trainer(4, save_interval=None).save_is_due(None)
    saved = trainer(4)
    saved.checkpoints.last_saved = 4
    assert not saved.save_is_due(None) and not saved.save_is_due(SAVING)


def test_temporary_saves_are_due_between_the_others() -> None:
    due = [number for number in range(1, 11) if trainer(number, save_interval=4, temporary=2).temporary_save_is_due()]
    assert due == [2, 6]  # not 10: the last iteration has a checkpoint of its own
    assert not trainer(6, save=None, temporary=2).temporary_save_is_due()
    calls: list[str] = []
    run = trainer(6, save_interval=4, temporary=2, decisions=(None, UNSAVED), calls=calls)
    assert run.check_exit() is UNSAVED and calls == ["flush"]  # a step that was not finite is not saved


def test_evaluations_are_due_by_interval_if_there_is_data() -> None:
    assert trainer(4).evaluation_is_due() and not trainer(5).evaluation_is_due()
    assert not trainer(4, valid=None).evaluation_is_due() and not trainer(4, eval_interval=None).evaluation_is_due()


def test_the_first_evaluation() -> None:
    assert [k for k in range(1, 11) if trainer(k, start=5).evaluation_is_due()] == [6, 8, 10]
    assert trainer(6, start=6).evaluation_is_due()


def test_a_skipped_step_takes_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    run = trainer(5, calls=calls)
    assert run.skips_step()
    assert [number for number in range(1, 11) if trainer(number - 1).skips_step()] == [6, 8, 9]
    rewound = trainer(2)
    rewound.checkpoints.record.rewinds.add([Rewind(spike=4, iteration=2, first=3)])
    assert rewound.skips_step()
    run.state = TrainState(iteration=5, consumed_train_samples=40, consumed_tokens=7)
    run.batches = BatchSchedule(8, 2, 2)
    run.splits.train = StepData(iter(range(100)), micro_batch_size=2)
    run.skip_step()
    assert next(run.splits.train) == 2  # two micro-batches were read
    assert run.state == TrainState(iteration=6, consumed_train_samples=48, skipped_train_samples=8, consumed_tokens=7)
    assert calls == ["skip {'samples': 8}"]
    assert capsys.readouterr().out == "iteration 6 is skipped (--iterations-to-skip)\n"


@pytest.mark.parametrize(("iteration", "asks_all"), [(5, False), (4, True), (10, True)])
def test_before_a_save_and_at_the_end_every_rank_is_asked(iteration: int, asks_all: bool) -> None:
    calls: list[str] = []
    run = trainer(iteration, save_interval=4, decisions=(None, UNSAVED), calls=calls)
    assert run.check_exit() is (UNSAVED if asks_all else None)
    assert calls == ["flush"] * asks_all


def test_an_exit_that_saves_asks_all_ranks_first() -> None:
    assert trainer(5, decisions=(SAVING, UNSAVED)).check_exit() is UNSAVED


def test_an_early_exit_is_logged_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    trainer(5, calls=calls).report_exit(UNSAVED)
    assert calls == ["flush", "exit {'reason': 'non-finite'}"]
    assert capsys.readouterr().out == "exiting after a loss of NaN (iteration 5)\n"


def test_the_end_in_order() -> None:
    calls: list[str] = []
    trainer(10, calls=calls).close()
    closed = "checkpoints.close False"  # its last iteration is not saved
    assert calls == ["finish_save", closed, "on_exit", "exit.close", "log.close", "data.close"]


def test_a_failure_names_rank_and_phase_and_closes_without_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    run = trainer(5, calls=calls)
    with pytest.raises(OSError), run.in_phase("saving"):
        raise OSError("disk full")
    run.close_after_failure(OSError("disk full"))
    assert capsys.readouterr().err == "rank 1 of 2 failed in saving, after iteration 5: disk full\n"
    assert calls == ["leave_save", "on_exit", "close_writers", "data.close"]
    with pytest.raises(WorkerCrashed, match=r"a mapped index \(.idx, or .npy of the index cache\) became") as caught:
        run.close_after_failure(RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."))
    assert caught.value.__suppress_context__ and "DataLoader" not in capsys.readouterr().err  # torch's own words
    run.close_after_failure(UserError("a sentence"))
    assert capsys.readouterr().err == ""


def test_a_phase_ends_with_its_block() -> None:
    run = trainer()
    with run.in_phase("evaluation"):
        assert run.phase == "evaluation"
    assert run.phase == "training"
