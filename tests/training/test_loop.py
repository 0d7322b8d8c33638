"""The loop and the step by themselves, with fake parts that record their calls."""

import dataclasses
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.runs import GPT, TINY
from torch import Tensor

from megatron.core.optimizer import StepUpdate
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import loop
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.hooks.exit import ExitDecision, ExitReason
from megatron.training.loop import run_pretraining
from megatron.training.rewind import mark_step_start

# ---------------------------------------------------------------------------------------------------------------------
# The loop


class FakeTrainer:
    """Iterates `train_iters` times; the ranks agree to exit after iteration `exit_after`."""

    skipped = 0
    temporary = False

    def __init__(self, train_iters: int, exit_after: int | None = None) -> None:
        self.calls: list[str] = []
        self.exit_after = exit_after
        self.state = SimpleNamespace(iteration=0)
        self.config = SimpleNamespace(training=SimpleNamespace(train_iters=train_iters))
        self.environment = SimpleNamespace(logs=True)
        self.log = SimpleNamespace(start=lambda iteration: self.calls.append("log.start"))
        note = {name: self._noting(name) for name in ("on_start", "before_step", "after_step")}
        self.hooks = SimpleNamespace(**note)

    def _noting(self, name: str) -> Any:
        return lambda iteration: self.calls.append(f"{name} {iteration}")

    def is_done(self) -> bool:
        return self.state.iteration >= self.config.training.train_iters

    def skips_step(self) -> bool:
        return self.state.iteration + 1 == self.skipped

    def skip_step(self) -> None:
        self.record_step("nothing")

    def record_step(self, result: str) -> None:
        self.state.iteration += 1
        self.calls.append(f"record {result}")

    def evaluation_is_due(self) -> bool:
        return self.state.iteration == 1

    def evaluate(self, split: str, *, at_end: bool) -> None:
        assert at_end == self.is_done()
        self.calls.append(f"evaluate {split}")

    def check_exit(self) -> ExitDecision | None:
        left = self.state.iteration == self.exit_after
        return ExitDecision(ExitReason.INTERVAL, "exiting", 0, save=True) if left else None

    def save_is_due(self, decision: ExitDecision | None) -> bool:
        return decision is not None or self.is_done()

    def temporary_save_is_due(self) -> bool:
        return self.temporary and self.state.iteration == 1

    def save(self, *, temporary: bool = False) -> None:
        self.calls.append("temporary save" if temporary else "save")

    def report_exit(self, decision: ExitDecision) -> None:
        self.calls.append(decision.message)


def calls_of(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[ExitDecision | None, list[str]]:
    monkeypatch.setattr(loop, "train_step", lambda trainer: "step")
    monkeypatch.setattr(loop, "evaluate_split", FakeTrainer.evaluate)
    return loop.train(trainer), trainer.calls


def test_the_loop_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    decision, calls = calls_of(FakeTrainer(2), monkeypatch)
    first = ["before_step 0", "record step", "after_step 1", "evaluate valid"]
    second = ["before_step 1", "record step", "after_step 2", "save"]
    assert decision is None and calls == ["log.start", "on_start 0", *first, *second]


def test_a_temporary_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeTrainer(2)
    run.temporary = True
    assert [call for call in calls_of(run, monkeypatch)[1] if "save" in call] == ["temporary save", "save"]
    left = FakeTrainer(2, exit_after=1)
    left.temporary = True
    assert [call for call in calls_of(left, monkeypatch)[1] if "save" in call] == ["save"]


def test_a_skipped_iteration_is_an_iteration_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = FakeTrainer(2)
    recorded.skipped = 2
    _, calls = calls_of(recorded, monkeypatch)
    assert [call for call in calls if call.startswith(("record", "after_step"))] == [
        *("record step", "after_step 1", "record nothing", "after_step 2"),
    ]


def test_an_exit_ends_the_loop_after_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    decision, calls = calls_of(FakeTrainer(9, exit_after=1), monkeypatch)
    assert decision is not None and decision.reason is ExitReason.INTERVAL
    assert calls[-3:] == ["evaluate valid", "save", "exiting"]


def test_nothing_left_to_train_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    decision, calls = calls_of(FakeTrainer(0), monkeypatch)
    assert decision is None and calls == ["log.start", "on_start 0"]
    assert capsys.readouterr().out == "nothing is left to train: iteration 0 of 0\n"


# ---------------------------------------------------------------------------------------------------------------------
# The step


class FakeOptimizer:
    """Applies an update if the losses are finite; its one group may have a rate of its own."""

    def __init__(self, **group: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": torch.tensor(0.0, dtype=torch.float64), **group}]

    def zero_grad(self) -> None:
        pass

    def get_loss_scale(self) -> Tensor:
        return torch.tensor(8.0)

    def step_on_device(self, loss_is_finite: Tensor) -> StepUpdate:
        return StepUpdate(torch.tensor(1.0), loss_is_finite)


def stepped(loss: float, **group: float) -> tuple[loop.StepResult, OptimizerParamScheduler]:
    optimizer: Any = FakeOptimizer(**group)
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 0.5, 0.0, 0, 100, "linear", 0.0, 0.0, 100, "constant")
    scheduler.step(20)
    zeroed: list[int] = []
    asked: dict[str, Any] = {}

    def forward_backward(**arguments: Any) -> list[dict[str, Tensor]]:
        asked.update(arguments)
        return [{"lm loss": torch.tensor([loss, 2.0])}]

    chunk = SimpleNamespace(zero_grad_buffer=lambda: zeroed.append(1))
    result = loop.run_step(
        loop.StepParts(forward_backward, print, [chunk], optimizer, scheduler),
        loop.StepSizes(num_microbatches=3, micro_batch_size=2, seq_length=16, global_batch_size=10),
        iter(()),
        {"rng_position_of": len},
    )
    assert "decoder_seq_length" not in asked
    assert zeroed == [1] and asked["forward_only"] is False and asked["rng_position_of"] is len
    assert (asked["num_microbatches"], asked["micro_batch_size"], asked["seq_length"]) == (3, 2, 16)
    return result, scheduler


def test_a_step_advances_the_schedule_and_reports_what_it_was_made_with() -> None:
    result, scheduler = stepped(4.0)
    assert (float(result.learning_rate), float(result.loss_scale)) == (0.4, 8.0)
    assert scheduler.num_steps == 30 and float(scheduler.learning_rate) == 0.35


@pytest.mark.parametrize("loss", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_stops_update_and_schedule(loss: float) -> None:
    result, scheduler = stepped(loss)
    assert not result.update.update_applied and scheduler.num_steps == 20


def test_the_reported_rate_is_the_runs_where_all_parameters_here_have_their_own() -> None:
    """The first stage of a pipeline may hold the embedding alone, which takes the rate of --decoupled-lr."""
    result, _ = stepped(4.0, max_lr=0.05, min_lr=0.0)
    assert float(result.learning_rate) == 0.4 and result.decoupled_learning_rate is None


def test_losses_of_every_micro_batch_count_and_none_are_finite() -> None:
    one, bad = torch.tensor([1.0, 1.0]), torch.tensor([torch.nan, 1.0])
    cpu = torch.device("cpu")
    assert loop.losses_are_finite([{"a": one}, {"a": one}], cpu)
    assert not loop.losses_are_finite([{"a": one}, {"a": bad}], cpu)
    assert loop.losses_are_finite([], cpu)


def test_a_step_that_is_computed_again_begins_without_gradients() -> None:
    chunk, data = Mock(modules=list), Mock(rewind=lambda: True)
    go_back_to_start = mark_step_start([chunk], Mock(), data, None)
    assert go_back_to_start()
    chunk.zero_grad_buffer.assert_called_once_with()


def config_of(flags: str) -> PretrainConfig:
    words = f"{TINY} --mock-data --train-iters 9 {flags}".split()
    return configure(words, launch_environment=LaunchEnvironment(1, False))


def values_of(config: PretrainConfig) -> dict[str, str]:
    """Every value of every part, also those that are no fields (functions that a script may set)."""
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    parts["transformer"] = config.transformer
    values = {name: vars(part) if hasattr(part, "__dict__") else {"": part} for name, part in parts.items()}
    return {f"{part}.{name}": repr(value) for part, of_part in values.items() for name, value in of_part.items()}


@pytest.mark.parametrize(
    "flags",
    [
        "--fp16 --initial-loss-scale 1024 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--bf16 --num-experts 2 --moe-router-topk 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --eval-interval 2 --eval-iters 1 --num-layers 2 --mtp-num-layers 1",
    ],
)
def test_a_run_writes_nothing_into_its_config(flags: str) -> None:
    config = config_of(f"{flags} --train-iters 2 --lr-decay-iters 9")
    before = values_of(config)
    assert len(before) > 400 and any(name.startswith("transformer.") for name in before)
    run_pretraining(config, GPT, time.monotonic())
    assert values_of(config) == before
