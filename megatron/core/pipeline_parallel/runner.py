"""Executes a list of actions for one rank. Knows micro-batches, losses and gradients; nothing about models."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.collectives import all_reduce
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.orders import Action, Kind
from megatron.core.process_groups_config import ProcessGroupCollection

ForwardStep = Callable[..., tuple[Tensor, Callable[..., Any] | None]]


@dataclass(frozen=True)
class Task:
    """What is run for every micro-batch."""

    forward_step_func: ForwardStep
    """(data_iterator, model) -> (output, loss_func); see `get_forward_backward_func`."""
    data_iterator: Any
    model: nn.Module
    config: Any
    groups: ProcessGroupCollection
    num_microbatches: int
    collect_non_loss_data: bool = False
    before_micro_batch: Callable[[int], None] | None = None
    """Called with the micro-batch's number before its forward: places it in the run, on every stage."""


@dataclass
class Runner:
    """Runs a list of actions over a task; results gather in `reports` and `num_tokens`."""

    task: Task
    reports: list[Any] = field(default_factory=list)
    """What the loss function reports, one entry a micro-batch."""
    num_tokens: Tensor | None = None
    """Tokens of all micro-batches, as three-value loss functions count them: a scalar on the device."""

    def __post_init__(self) -> None:
        self._to_come: set[int] = set()
        """Micro-batches whose backward is still to come."""
        self._losses: dict[int, Tensor] = {}
        self._held_back = contextlib.ExitStack()

    def run(self, actions: Sequence[Action]) -> None:
        """Execute the actions in order. No reduction of gradients starts before the SYNC action."""
        self._to_come = {action.micro_batch for action in actions if action.kind is Kind.BACKWARD}
        steps = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.SYNC: self._sync}
        with self._held_back:
            if any(action.kind is Kind.SYNC for action in actions):
                self._held_back.enter_context(no_sync_of(self.task.model, self.task.config)())
            for action in actions:
                steps[action.kind](action.micro_batch)

    def _sync(self, micro_batch: int) -> None:
        self._held_back.close()

    def _forward(self, micro_batch: int) -> None:
        task = self.task
        if task.before_micro_batch is not None:
            task.before_micro_batch(micro_batch)
        output, loss_func = task.forward_step_func(task.data_iterator, task.model)
        if loss_func is None:
            self.reports.append(output)
        elif task.collect_non_loss_data:
            self.reports.append(loss_func(output, non_loss_data=True))
        else:
            output = self._loss(loss_func(output))
        if micro_batch in self._to_come:
            self._losses[micro_batch] = output

    def _loss(self, result: Sequence[Any]) -> Tensor:
        """The part of the step's loss that this micro-batch is, from the two or three values of a loss function."""
        task, parts = self.task, self.task.groups.size("cp")
        if len(result) == 2:
            loss, report = result
            if task.config.calculate_per_token_loss:
                raise UserError(
                    "--calculate-per-token-loss needs a loss function that returns three values (sum, number of "
                    "tokens, report); this one returned two"
                )
            # Gradients are averaged over context parallel ranks too, each of which has a part of the sequence.
            loss = loss * parts / task.num_microbatches
        else:
            loss, count, report = result
            if not isinstance(count, Tensor):
                count = torch.full((), count, device=loss.device)  # a kernel, not a copy that waits
            self._count(count)
            if not task.config.calculate_per_token_loss:
                loss = loss * parts / self._of_whole_sequences(count).clamp(min=1) / task.num_microbatches
        self.reports.append(report)
        return loss

    def _of_whole_sequences(self, count: Tensor) -> Tensor:
        """Tokens of the micro-batch over all its context parallel parts."""
        if self.task.groups.size("cp") == 1:
            return count
        return all_reduce(count.clone(), self.task.groups.cp)

    def _count(self, tokens: Tensor) -> None:
        tokens = tokens.detach().reshape(())
        self.num_tokens = tokens.clone() if self.num_tokens is None else self.num_tokens + tokens

    def _backward(self, micro_batch: int) -> None:
        loss = self._losses.pop(micro_batch)
        if self.task.config.grad_scale_func is not None:
            loss = self.task.config.grad_scale_func(loss)
        loss.backward()


def no_sync_of(model: nn.Module, config: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What holds reductions back: the config's hook, else the wrapper's own method, else nothing."""
    return config.no_sync_func or getattr(model, "no_sync", None) or contextlib.nullcontext


def takes(function: Callable[..., Any], name: str) -> bool:
    """The function has a parameter of this name, or takes any."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)
