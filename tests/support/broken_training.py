"""Trains a GPT with a fault on purpose: python tests/support/broken_training.py --fault shuffled-labels FLAGS

The flags are those of pretrain_gpt.py. tests/data/loss_curves has curves that this script made; the tests of the resume
gate use its counter.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.training import pretrain
from megatron.training.hooks.hook import Hook
from megatron.training.providers import Context, ForwardStep, Providers

FAULTS = ("none", "shuffled-labels", "no-gradient", "random-batches", "unsaved-counter", "not-repeatable")


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of the fault."""
    group = parser.add_argument_group("fault")
    group.add_argument("--fault", choices=FAULTS, default="none", help="What goes wrong.")
    group.add_argument("--fault-iterations", type=int, nargs="*", default=[], help="Iterations at which it goes wrong.")
    group.add_argument("--fault-from", type=int, default=0, help="Iteration from which on it goes wrong.")
    return parser


class StepCounter(Hook):
    """Counts steps in this process. No checkpoint keeps the count, so it starts again when a run is resumed."""

    def __init__(self) -> None:
        self.steps = 0
        self.iteration = 0

    def before_step(self, iteration: int) -> None:
        """Notes the step that comes next."""
        self.steps += 1
        self.iteration = iteration + 1


class FaultyData(Iterator[Any]):
    """The micro-batches of a step, with labels or tokens that are wrong."""

    def __init__(self, data: Any, spoil: Any) -> None:
        self._data, self._spoil = data, spoil

    def __next__(self) -> Any:
        return self._spoil(next(self._data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def build_providers() -> Providers:
    """Returns the providers of pretrain_gpt.py, with a faulty forward step."""
    counter = StepCounter()

    def build_forward_step(context: Context) -> ForwardStep:
        fault, at = context.config.extra["fault"], context.config.extra["fault_iterations"]
        begin, forward = context.config.extra["fault_from"], pretrain_gpt.build_forward_step(context)

        def spoil(batch: Any) -> Any:
            generator = torch.Generator().manual_seed(counter.iteration)
            if fault == "shuffled-labels":
                order = torch.randperm(batch.labels.numel(), generator=generator)
                return replace(batch, labels=batch.labels.flatten()[order].view_as(batch.labels))
            if fault == "random-batches" and counter.iteration in at:
                noise = torch.randint(0, context.vocab_size, batch.tokens.shape, generator=generator)
                return replace(batch, tokens=noise, labels=noise.roll(-1, 1))
            return batch

        def forward_step(data: Any, model: nn.Module) -> tuple[Tensor, Any]:
            losses, loss_func = forward(FaultyData(data, spoil), model)

            def faulty_loss(values: Tensor) -> Any:
                total, *rest = loss_func(values)
                if fault == "no-gradient" and counter.iteration > begin:
                    total = total * 0.0
                if fault == "unsaved-counter":
                    total = total * (1.0 + 0.01 * counter.steps)
                if fault == "not-repeatable":
                    total = total * (1.0 + 0.01 * random.SystemRandom().random())
                return total, *rest

            return losses, faulty_loss

        return forward_step

    def build_hooks(context: Context) -> Sequence[Hook]:
        return [counter]

    return Providers(pretrain_gpt.build_model, pretrain_gpt.build_datasets, build_forward_step, build_hooks=build_hooks)


if __name__ == "__main__":
    pretrain(build_providers(), extra_args_provider=add_flags, args_defaults={"model_family": "gpt"})
