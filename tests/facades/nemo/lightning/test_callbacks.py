"""Callbacks are called in Lightning's order, and may end a run."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.nemo_runs import CALLS, INSIDE_STEPS, OF_MODULES, gpt, listening, made_up_data, trainer_of
from torch import nn

from megatron.core.exceptions import UserError
from megatron.facades.nemo import lightning as nl
from megatron.facades.nemo import llm
from megatron.facades.nemo.lightning.callbacks import draws_or_saves


def both(name: str) -> list[str]:
    return [f"callback {name}", f"module {name}"]


def evaluation(kind: str, batches: int = 2) -> Iterator[str]:
    """The calls of an evaluation, in the order that Lightning 2.6 makes them."""
    yield f"module on_{kind}_model_eval"
    yield from both(f"on_{kind}_start")
    yield from both(f"on_{kind}_epoch_start")
    for _ in range(batches):
        yield from both(f"on_{kind}_batch_start")
        yield from both(f"on_{kind}_batch_end")
    yield from both(f"on_{kind}_epoch_end")
    yield from both(f"on_{kind}_end")
    yield f"module on_{kind}_model_train"


def training(steps: int, every: int) -> Iterator[str]:
    """The calls of a fit, in the order that Lightning 2.6 makes them."""
    yield from ["data prepare_data", "data setup", *both("setup")]
    for name in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
        yield from both(name)
    for step in range(1, steps + 1):
        yield from both("on_train_batch_start")
        yield from both("on_train_batch_end")
        if step % every == 0:
            yield from evaluation("validation")
    for name in ("on_train_epoch_end", "on_train_end", "on_fit_end"):
        yield from both(name)
    yield from ["data teardown", *both("teardown")]


def parts_of(calls: list[str]) -> tuple[Any, Any, Any]:
    """A callback, a module and a data module that write down their calls."""
    data = listening(calls, "data", llm.MockDataModule, ("prepare_data", "setup", "teardown"))
    sizes = {"seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "num_workers": 0}
    return (
        listening(calls, "callback", object)(),
        gpt(listening(calls, "module", llm.GPTModel, (*CALLS, *OF_MODULES))),
        data(**sizes),
    )


def test_a_fit_calls_in_lightnings_order() -> None:
    calls: list[str] = []
    callback, module, data = parts_of(calls)
    trainer_of(4, callbacks=callback).fit(module, data)
    assert calls == [*training(4, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kind"), [("validate", "validation"), ("test", "test")])
def test_an_evaluation_calls_in_lightnings_order(stage: str, kind: str) -> None:
    calls: list[str] = []
    callback, module, data = parts_of(calls)
    trainer = trainer_of(4, callbacks=callback)
    getattr(trainer, stage)(module, datamodule=data)
    beginning, end = ["data prepare_data", "data setup", *both("setup")], ["data teardown", *both("teardown")]
    assert calls == [*beginning, *evaluation(kind), *end]


class Watch:
    """Reads the trainer as callbacks do, and stops the run."""

    def __init__(self, last: int) -> None:
        self.last, self.steps, self.losses, self.events, self.logged = last, [], [], [], []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append((trainer.global_step, batch_idx))
        self.losses.append((float(outputs["loss"]), float(trainer.callback_metrics["reduced_train_loss"])))
        self.logged.append(float(trainer.callback_metrics["rows"]))
        trainer.should_stop = trainer.global_step == self.last

    def on_megatron_step_start(self, step: Any) -> None:
        self.events.append(("start", step.step_i, step.num_microbatches))

    def on_megatron_microbatch_end(self, step: Any, batch: Any, forward_callback: Any, output: Any) -> None:
        self.events.append(("batch", type(forward_callback).__name__, tuple(output.shape)))

    def on_megatron_step_end(self, step: Any, microbatch_outputs: Any, reduced: Any) -> None:
        self.events.append(("end", len(microbatch_outputs), float(reduced)))


class LoggingGPT(llm.GPTModel):
    def training_step(self, batch: Any, batch_idx: int | None = None) -> torch.Tensor:
        self.log("rows", len(batch["tokens"]), prog_bar=True)
        return super().training_step(batch)


def test_a_callback_sees_steps_losses_and_events_and_ends_the_run() -> None:
    watch = Watch(last=2)
    trainer = trainer_of(9, callbacks=[watch])
    trainer.limit_val_batches = 0
    trainer.fit(gpt(LoggingGPT), datamodule=made_up_data())
    assert watch.steps == [(1, 0), (2, 1)] and trainer.global_step == 2
    assert [loss for loss, _ in watch.losses] == [metric for _, metric in watch.losses]
    assert watch.logged == [2.0, 2.0]
    step = [("batch", "MaskedTokenLossReduction", (2, 16))] * 2
    first, second = (loss for loss, _ in watch.losses)
    assert watch.events == [
        *[("start", 0, 2), *step, ("end", 2, pytest.approx(first))],
        *[("start", 1, 2), *step, ("end", 2, pytest.approx(second))],
    ]


def test_a_method_inside_a_step_is_refused() -> None:
    callback = listening([], "callback", object, INSIDE_STEPS)()
    with pytest.raises(UserError, match=r"on_before_backward: a step runs without the host"):
        trainer_of(1, callbacks=callback).fit(gpt(), datamodule=made_up_data())


class Failing:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        raise ZeroDivisionError

    def on_exception(self, trainer: Any, module: nn.Module, exception: BaseException) -> None:
        self.heard.append(type(exception).__name__)

    def on_train_end(self, trainer: Any, module: nn.Module) -> None:
        self.heard.append("on_train_end")


@pytest.mark.slow
def test_callbacks_hear_of_an_exception_instead_of_the_end() -> None:
    failing = Failing()
    with pytest.raises(ZeroDivisionError):
        trainer_of(2, callbacks=[failing]).fit(gpt(), datamodule=made_up_data())
    assert failing.heard == ["ZeroDivisionError"]


def test_lightnings_callbacks_that_draw_or_save_are_left_out() -> None:
    bar = type("MegatronProgressBar", (type("ProgressBar", (), {"__module__": "lightning.pytorch.callbacks"}),), {})
    assert nl.Trainer(callbacks=nl.ModelCheckpoint()).callbacks
    assert [draws_or_saves(each) for each in (nl.ModelCheckpoint(), bar(), Failing())] == [True, True, False]


def test_lightnings_callbacks_that_need_its_loops_are_refused() -> None:
    averaging = type("StochasticWeightAveraging", (), {})()
    with pytest.raises(UserError, match=r"callbacks=\[StochasticWeightAveraging\(...\)\]: leave it out; --ema-decay"):
        trainer_of(1, callbacks=averaging).fit(gpt(), datamodule=made_up_data())
