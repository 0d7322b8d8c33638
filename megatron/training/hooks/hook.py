"""The interface of hooks: actions that only some runs take, called from fixed places of the training loop."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from megatron.core.optimizer import MegatronOptimizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import Environment
from megatron.training.state import TrainState


class RunOfHook(Protocol):
    """The parts of a run that hooks may use: those of `megatron.training.trainer.Trainer`."""

    config: PretrainConfig
    environment: Environment
    """This rank, its device and its process groups."""
    state: TrainState
    """Counts of the run, such as consumed samples."""
    optimizer: MegatronOptimizer
    log: Any
    """The `TrainingLog`: `event(name, iteration, **facts)`, and `task(TaskRecord(...))` for scores."""
    last_step: Any
    """The `StepResult` of the last step: `reports` (losses of each micro-batch, on the device; empty on ranks without
    the loss), `update` (gradient norm) and `sample_ids`. None before the first step."""

    @property
    def model(self) -> Sequence[nn.Module]:
        """This rank's model chunks."""

    @property
    def evaluations(self) -> Mapping[str, Mapping[str, float]]:
        """Results of the last evaluation by split or task, then by name. Ranks without the loss have only tasks."""

    def full_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns the logits after each token of some rows: [rows, longest row, vocabulary], the same on every rank, in
        every layout. Every rank must call it."""
        ...


class Hook:
    """The methods that a hook may override. Every rank has the same hooks and calls them in the same order.

    `iteration` is the number of iterations done: 0 before the first step of a new run.
    """

    run: RunOfHook
    """The run. It is set when the run is built, so `__init__` does not have it."""

    def attach(self, run: RunOfHook) -> None:
        """Sets `run`; called once, before `on_start`."""
        self.run = run

    def on_start(self, iteration: int) -> None:
        """Training begins; called once."""

    def before_step(self, iteration: int) -> None:
        """Step number `iteration` + 1 starts next."""

    def after_step(self, iteration: int) -> None:
        """Step number `iteration` is queued; the device may still compute it."""

    def before_evaluate(self, iteration: int) -> None:
        """An evaluation starts next."""

    def after_evaluate(self, iteration: int) -> None:
        """An evaluation ended."""

    def after_save(self, iteration: int) -> None:
        """A checkpoint of this iteration is complete."""

    def on_exit(self, iteration: int) -> None:
        """Training ended, possibly by an exception; called once if `on_start` was called."""


class Hooks(Hook):
    """Several hooks as one. `on_exit` calls them in reverse order, and calls each even if another raised."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.hooks = tuple(hooks)

    def attach(self, run: RunOfHook) -> None:
        """Calls each hook."""
        for hook in self.hooks:
            hook.attach(run)

    def on_start(self, iteration: int) -> None:
        """Calls each hook."""
        for hook in self.hooks:
            hook.on_start(iteration)

    def before_step(self, iteration: int) -> None:
        """Calls each hook."""
        for hook in self.hooks:
            hook.before_step(iteration)

    def after_step(self, iteration: int) -> None:
        """Calls each hook."""
        for hook in self.hooks:
            hook.after_step(iteration)

    def before_evaluate(self, iteration: int) -> None:
        """Calls each hook."""
        for hook in self.hooks:
            hook.before_evaluate(iteration)

    def after_evaluate(self, iteration: int) -> None:
        """Calls each hook."""
        for hook in self.hooks:
            hook.after_evaluate(iteration)

    def after_save(self, iteration: int) -> None:
        """Calls each hook."""
        for hook in self.hooks:
            hook.after_save(iteration)

    def on_exit(self, iteration: int) -> None:
        """Calls the hooks in reverse order; raises the first error after all were called."""
        errors = []
        for hook in reversed(self.hooks):
            try:
                hook.on_exit(iteration)
            except Exception as error:  # the other hooks must still clean up
                errors.append(error)
        if errors:
            raise errors[0]
