"""Calls callbacks, module and data module at the places of Lightning's loops, from the hooks of a run.

The order of the calls is that of Lightning's Trainer; a test compares it with a real one. The places inside a step
(backward, the optimizer) are not served: forward, backward and update of all micro-batches run without the host.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import all_reduce
from megatron.facades.nemo.lightning.arguments import Foreign
from megatron.facades.nemo.lightning.bases import defines
from megatron.facades.nemo.lightning.flags import Flags
from megatron.facades.nemo.lightning.folders import is_checkpoint_callback
from megatron.facades.nemo.lightning.loss import Report
from megatron.facades.nemo.lightning.megatron_parallel import CallbackMethods, MegatronParallel, MegatronStep, call
from megatron.facades.nemo.lightning.module_steps import Kind, StepFunctions
from megatron.training.hooks.hook import Hook, RunOfHook
from megatron.training.trainer import Trainer as Run

INSIDE_STEPS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "backward",
)
"""Methods that Lightning calls inside a step, and that this package refuses."""
OF_STEPS = (
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_end",
    *(name for name in vars(CallbackMethods) if name.startswith("on_")),
)
"""Methods that may use the loss of a step."""
_STATE = ("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint")
_DRAWS = ("ProgressBar", "ModelSummary", "Checkpoint", "LearningRateMonitor")
"""Lightning's own callbacks that draw, log or save, which the run does itself."""
_REFUSED = {
    "BatchSizeFinder": "tools/plan.py chooses the size of micro-batches",
    "DeviceStatsMonitor": "--log-memory-interval logs the memory of GPUs",
    "GradientAccumulationScheduler": "--rampup-batch-size changes the size of batches",
    "LearningRateFinder": "tools/sweep.py compares rates",
    "StochasticWeightAveraging": "--ema-decay averages weights",
}
"""Lightning's own callbacks that need its loops, with what to do instead."""


class Listeners:
    """Those that hear of a stage: its data module, callbacks and module."""

    def __init__(self, trainer: Foreign, module: nn.Module, datamodule: Foreign, callbacks: Iterable[object]) -> None:
        self.trainer, self.module, self.datamodule = trainer, module, datamodule
        given = [each for each in callbacks if not draws_or_saves(each)]
        self.callbacks = [each for each in given if type(each).__name__ not in _REFUSED]
        self.refused = [type(each).__name__ for each in given if each not in self.callbacks]

    def check(self, flags: Flags) -> None:
        """Adds a problem for each callback and method that would do nothing, and a note for state that is not saved."""
        for name in self.refused:
            flags.refuse(f"callbacks=[{name}(...)]", f"leave it out; {_REFUSED[name]}")
        for listener in (*self.callbacks, self.module):
            name = type(listener).__name__
            for method in INSIDE_STEPS:
                if defines(listener, method):
                    advice = "a step runs without the host, so it is not called; use on_train_batch_start or _end"
                    flags.refuse(f"{name}.{method}", advice)
            if any(defines(listener, method) for method in _STATE if listener is not self.module):
                flags.note(f"{name}: checkpoints keep the state of the run, not that of callbacks")

    def data(self, name: str, *arguments: object) -> None:
        """Calls a method of the data module, if it has one."""
        call(self.datamodule, name, *arguments)

    def of_module(self, name: str, *arguments: object) -> None:
        """Calls a method of the module, if it has one."""
        call(self.module, name, *arguments)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a method of each callback, with trainer and module first, and then the module's."""
        for callback in self.callbacks:
            call(callback, name, self.trainer, self.module, *arguments)
        self.of_module(name, *arguments)

    def set_up(self, stage: str) -> None:
        """Calls prepare_data and setup."""
        self.data("prepare_data")
        self.of_module("prepare_data")
        self.data("setup", stage)
        self.call_with_stage("setup", stage)

    def tear_down(self, stage: str) -> None:
        """Calls teardown."""
        self.data("teardown", stage)
        self.call_with_stage("teardown", stage)

    def call_with_stage(self, name: str, stage: str) -> None:
        """Calls setup or teardown of callbacks and module."""
        for callback in self.callbacks:
            call(callback, name, self.trainer, self.module, stage=stage)
        self.of_module(name, stage)

    def hears(self, *names: str) -> bool:
        """Whether anybody defines one of these methods."""
        return any(defines(listener, name) for listener in (*self.callbacks, self.module) for name in names)


def draws_or_saves(callback: object) -> bool:
    """Whether a callback does what the run does itself: saving checkpoints, and what Lightning's own print."""
    names = [cls.__name__ for cls in type(callback).__mro__ if cls.__module__.startswith("lightning.")]
    return is_checkpoint_callback(callback) or any(name in _DRAWS for name in names)


class StageHook(Hook):
    """Calls the listeners of a stage, and keeps the counts and metrics of its trainer."""

    def __init__(
        self,
        stage: str,
        listeners: Listeners,
        parallel: MegatronParallel,
        functions: Mapping[Kind, StepFunctions],
        metrics: "Metrics",
    ) -> None:
        self.stage, self.listeners, self.parallel = stage, listeners, parallel
        self.functions, self.metrics = functions, metrics
        self.batch = 0
        """Micro-batch steps of the evaluation that runs, each a global batch."""
        self.evaluating = False
        self.began = False
        self.hears_steps = listeners.hears(*OF_STEPS)
        self.reports: Sequence[Report] | None = None
        """Reports of the last step, if they are not reduced yet."""

    def attach(self, run: RunOfHook) -> None:
        """Begins the stage: everything is built, and nothing has run."""
        assert isinstance(run, Run)
        self.trainer_of_run = run
        super().attach(run)
        if self.stage == "fit" or run.state.iteration:  # an evaluation after a fit changes no step
            self.metrics.set_step(run.state.iteration)
        if self.stage == "fit":
            self.listeners.call("on_fit_start")

    def on_start(self, iteration: int) -> None:
        """Training begins."""
        self.began = True
        self.listeners.call("on_train_start")
        self.listeners.call("on_train_epoch_start")

    def before_step(self, iteration: int) -> None:
        """A step begins."""
        training = self.run.config.training
        run = self.trainer_of_run
        data = run.splits.train
        self.listeners.call("on_train_batch_start", data, iteration)
        self.parallel.begin(
            MegatronStep(
                self.parallel,
                data,
                run.forward_step,
                forward_only=False,
                micro_batch_size=training.micro_batch_size,
                seq_length=self.run.config.data.seq_length,
                num_microbatches=run.batches.num_microbatches,
                step_i=iteration,
            )
        )

    def after_step(self, iteration: int) -> None:
        """A step ended. Its loss is only reduced if anybody listens to steps; otherwise that of the last step is."""
        self.reports = [] if self.run.last_step is None else self.run.last_step.reports
        self.metrics.set_step(iteration)
        loss = self._reduce() if self.hears_steps else None
        self.listeners.call("on_train_batch_end", {"loss": loss}, self.trainer_of_run.splits.train, iteration - 1)
        self._stop_if_asked()

    def _reduce(self) -> Tensor:
        """Ends the step of MegatronParallel. Returns its loss on every rank, and makes it a metric of the trainer."""
        reduced = self.parallel.end(self.reports or [], self.functions["training"])
        loss = self._on_all_stages(None if reduced is None else reduced.detach())
        self.metrics.set("reduced_train_loss", loss)
        self.reports = None
        return loss

    def _on_all_stages(self, loss: Tensor | None) -> Tensor:
        """Returns the loss of the pipeline stage that has it, on all stages. Stays on the device."""
        groups, device = self.run.environment.groups, self.run.environment.device
        value = torch.zeros((), dtype=torch.float64, device=device) if loss is None else loss.double().reshape(())
        return all_reduce(value, groups.pp) if groups.size("pp") > 1 else value

    def _stop_if_asked(self) -> None:
        if getattr(self.listeners.trainer, "should_stop", False):
            self.trainer_of_run.exit.ask()

    @property
    def _word(self) -> str:
        return "test" if self.stage == "test" else "validation"

    def before_evaluate(self, iteration: int) -> None:
        """An evaluation begins."""
        if self.stage == "fit":
            self.listeners.of_module("on_validation_model_zero_grad")
        self.listeners.of_module(f"on_{self._word}_model_eval")
        self.listeners.call(f"on_{self._word}_start")
        self.listeners.call(f"on_{self._word}_epoch_start")
        self.batch, self.evaluating = 0, True
        self._micro_batches = 0

    def on_micro_batch(self, first_chunk: bool) -> None:
        """A micro-batch of an evaluation goes through a chunk next: the first of a global batch begins the batch."""
        if not self.evaluating or not first_chunk:
            return
        config = self.run.config
        count = config.evaluation.num_microbatches(config.training, self.run.environment.groups.size("dp"))
        if self._micro_batches % count == 0:
            self._end_batch()
            self.listeners.call(f"on_{self._word}_batch_start", None, self.batch, 0)
            self.batch += 1
        self._micro_batches += 1

    def samples_of_micro_batch(self, data: Foreign) -> int | None:
        """Returns the number of samples in the micro-batch that an evaluation of a whole set drew last, without the
        rows that fill up its last global batch. None elsewhere, and on ranks that draw nothing."""
        sets, position = self.trainer_of_run.splits.valid_sets, getattr(data, "rng_position", None)
        if not self.evaluating or not sets or sets[0].num_samples is None or position is None:
            return None
        evaluation, training = self.run.config.evaluation, self.run.config.training
        first = (self.batch - 1) * evaluation.global_batch_size(training) + int(position.first_sample)
        return min(max(sets[0].num_samples - first, 0), evaluation.micro_batch_size(training))

    def _end_batch(self) -> None:
        if self.batch:
            self.listeners.call(f"on_{self._word}_batch_end", None, None, self.batch - 1, 0)

    def after_evaluate(self, iteration: int) -> None:
        """An evaluation ended."""
        self._end_batch()
        self.evaluating = False
        split = next(iter(self.run.evaluations.values()), {})
        loss = torch.tensor(next(iter(split.values())), dtype=torch.float64) if split else None
        value = self._on_all_stages(None if loss is None else loss.to(self.run.environment.device))
        self.metrics.set("val_loss" if self._word == "validation" else "test_loss", value)
        self.listeners.call(f"on_{self._word}_epoch_end")
        self.listeners.call(f"on_{self._word}_end")
        self.listeners.of_module(f"on_{self._word}_model_train")
        self._stop_if_asked()

    def on_exit(self, iteration: int) -> None:
        """The stage ends, while the process groups still exist. After an exception nothing is called here."""
        if sys.exception() is not None:
            return
        if self.began:
            if self.reports is not None:
                self._reduce()
            self.listeners.call("on_train_epoch_end")
            self.listeners.call("on_train_end")
        if self.stage == "fit":
            self.listeners.call("on_fit_end")


class Metrics:
    """The step count and the metrics of a trainer: this package's, or Lightning's."""

    def __init__(self, trainer: Foreign) -> None:
        self.trainer = trainer

    def set_step(self, steps: int) -> None:
        """Sets `trainer.global_step`."""
        loop = getattr(self.trainer, "fit_loop", None)
        if loop is None:
            self.trainer.global_step = steps
            return
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = steps
        loop.epoch_loop.batch_progress.total.ready = loop.epoch_loop.batch_progress.total.completed = steps

    def set(self, name: str, value: Foreign) -> None:
        """Sets an entry of `trainer.callback_metrics` and `trainer.logged_metrics`."""
        connector = getattr(self.trainer, "_logger_connector", None)
        prefix, holder = ("_", connector) if connector is not None else ("", self.trainer)
        for kept in ("callback_metrics", "logged_metrics"):
            getattr(holder, prefix + kept)[name] = value


def keep_logged(module: nn.Module, metrics: Metrics, pending: dict[str, Tensor]) -> None:
    """Replaces `module.log`: a value goes to the trainer's metrics, and from the stage with the loss to the log."""

    def log(name: str, value: Foreign, *how: object, **more: object) -> None:
        tensor = torch.as_tensor(value).detach()
        metrics.set(name, tensor)
        pending[name] = tensor

    def log_dict(dictionary: Mapping[str, Foreign], *how: object, **more: object) -> None:
        for name, value in dictionary.items():
            log(name, value)

    object.__setattr__(module, "log", log)
    object.__setattr__(module, "log_dict", log_dict)


def weighted(value: Tensor, samples: int) -> Tensor:
    """Returns [sum, count] in place of the mean of a micro-batch, so that each sample of an evaluation counts once. A
    mean of none is 0 / 0."""
    if value.numel() != 1:
        return value
    return torch.stack([value.reshape(()) * samples, value.new_tensor(samples)]) if samples else value.new_zeros(2)


def with_logged(reports: Sequence[object], pending: dict[str, Tensor]) -> Sequence[object]:
    """Returns the result of a loss function, whose report is last, with the values that the module has logged."""
    *loss, report = reports
    assert isinstance(report, dict)
    found = {name: value.reshape(-1)[:1] for name, value in pending.items() if value.numel() == 1}
    pending.clear()
    return *loss, {**report, **found}
