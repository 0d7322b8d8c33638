"""Trains tiny models, in this process or on the ranks of a small world, and records the results."""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from support.processes import run_on_ranks
from torch import Tensor

import pretrain_gpt
from megatron.core.initializers import Constant
from megatron.core.parameters import Box, ParameterInfo, canonical_index
from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.facades.pretrain import pretrain, pretrain_config
from megatron.training import loop
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.hooks.exit import ExitDecision
from megatron.training.hooks.hook import Hook, Hooks
from megatron.training.log.records import Event, LogRecord, LogWriter, Speed, StepRecord, TaskRecord, ValidationRecord
from megatron.training.providers import Providers
from megatron.training.state import weight_chunks
from megatron.training.trainer import Trainer

torch.set_num_threads(1)  # the models are too small for several threads

GPT = Providers(
    pretrain_gpt.build_model, pretrain_gpt.build_datasets, pretrain_gpt.build_forward_step, cuts_shared_batches=True
)

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --num-workers 0 --log-interval 100 "
    "--tokenizer-type NullTokenizer --vocab-size 40 --split 80,10,10 --eval-iters 0"
)
"""Flags of a model of two layers with batches of four, without evaluation. Data and length of the run must be added."""


@dataclass
class TensorSlice:
    """A contiguous range of a canonical tensor, as one rank held it."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    start: int
    """Index of the first element in the box."""
    values: Tensor
    """Values, one-dimensional."""


@dataclass
class Outcome:
    """Results of a run on one rank."""

    decision: ExitDecision | None = None
    place: dict[str, int] = field(default_factory=dict)
    """Coordinate of the rank on each axis of the dense grid."""
    logs: bool = True
    """Whether this rank prints the log line."""
    steps: list[StepRecord] = field(default_factory=list)
    lines: list[LogRecord] = field(default_factory=list)
    validations: list[ValidationRecord] = field(default_factory=list)
    tasks: list[TaskRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    sample_ids: list[list[list[int]]] = field(default_factory=list)
    """Sample ids by iteration and micro-batch."""
    at_start: dict[str, Any] = field(default_factory=dict)
    """Everything that a checkpoint contains, before the first step."""
    at_end: dict[str, Any] = field(default_factory=dict)
    slices_at_start: list[TensorSlice] = field(default_factory=list)
    """Weights and optimizer state that this rank holds, before the first step."""
    slices_at_end: list[TensorSlice] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [step.losses["lm loss"] for step in self.steps]

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.at_end.items() if name.startswith("weight ")}


class _Recorder(Hook, LogWriter):
    """Records a run in an outcome."""

    def __init__(self, run: Trainer, outcome: Outcome) -> None:
        self.run, self.outcome = run, outcome
        groups = run.environment.groups
        outcome.place = {axis: groups.rank(axis) for axis in ("tp", "cp", "dp", "pp")}
        outcome.logs = run.environment.logs

    def on_start(self, iteration: int) -> None:
        self.outcome.slices_at_start = slices(self.run)
        self.outcome.at_start = everything(self.run, self.outcome.slices_at_start)

    def after_step(self, iteration: int) -> None:
        ids = [
            batch.tolist() if isinstance(batch, Tensor) else list(batch) for batch in self.run.splits.train.sample_ids
        ]
        self.outcome.sample_ids.append(ids)

    def on_exit(self, iteration: int) -> None:
        self.outcome.slices_at_end = slices(self.run)
        self.outcome.at_end = everything(self.run, self.outcome.slices_at_end)

    def steps(self, steps: Sequence[StepRecord], speed: Speed) -> None:
        self.outcome.steps += steps

    def line(self, record: LogRecord) -> None:
        self.outcome.lines.append(record)

    def validation(self, record: ValidationRecord) -> None:
        self.outcome.validations.append(record)

    def task(self, record: TaskRecord) -> None:
        self.outcome.tasks.append(record)

    def event(self, event: Event) -> None:
        self.outcome.events.append(event)


def everything(run: Trainer, held: Sequence[TensorSlice]) -> dict[str, Any]:
    """Returns all state of a run by name: weights, optimizer, schedule, counts. To compare layouts use `slices`.
    `held`: what `slices` returned. A further part of a tensor, such as another box of it, has a number."""
    parts = Counter[str]()
    tensors = {}
    for part in held:
        parts[part.name] += 1
        tensors[part.name if parts[part.name] == 1 else f"{part.name} ({parts[part.name]})"] = part.values
    common = run.optimizer.common_state()
    return tensors | {"state": run.state.to_json(), "scheduler": run.scheduler.state_dict(), "optimizer": common}


def slices(run: Trainer) -> list[TensorSlice]:
    """Copies all tensors that this rank holds for a checkpoint, also those that another rank would write."""
    held = [(f"weight {chunk.name}", chunk) for chunk in weight_chunks(run.model, run.environment.groups)]
    held += [(chunk.name, chunk) for chunk in run.optimizer.state_chunks()]
    return [
        TensorSlice(name, chunk.global_shape, chunk.box, chunk.range[0], chunk.values().clone()) for name, chunk in held
    ]


def gathered(held: Iterable[Sequence[TensorSlice]]) -> dict[str, Tensor]:
    """Joins the slices of all ranks into whole canonical tensors. Checks that replicas are bit-equal, all there."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for tensor_slice in (tensor_slice for slices_of_rank in held for tensor_slice in slices_of_rank):
        values = tensor_slice.values.cpu()
        tensor = whole.setdefault(tensor_slice.name, torch.zeros(tensor_slice.global_shape, dtype=values.dtype))
        known = filled.setdefault(tensor_slice.name, torch.zeros(tensor.numel(), dtype=torch.bool))
        info = ParameterInfo(tensor_slice.global_shape, tensor_slice.box, Constant(0.0))
        index = canonical_index(info, tensor_slice.start, values.numel())
        again = known[index]
        assert torch.equal(tensor.view(-1)[index[again]], values[again]), f"copies of {tensor_slice.name} differ"
        tensor.view(-1)[index] = values
        known[index] = True
    missing = [name for name, known in filled.items() if not known.all()]
    assert not missing, f"no rank holds all of {missing}"
    return whole


def state_at_start(ranks: Sequence[Outcome]) -> dict[str, Tensor]:
    """Returns whole weights and optimizer state before the first step, for any layout."""
    return gathered(rank.slices_at_start for rank in ranks)


def state_at_end(ranks: Sequence[Outcome]) -> dict[str, Tensor]:
    """Returns whole weights and optimizer state after the last step, for any layout."""
    return gathered(rank.slices_at_end for rank in ranks)


def logger_of(ranks: Sequence[Outcome]) -> Outcome:
    """Returns the outcome of the rank that prints the log line."""
    (outcome,) = (rank for rank in ranks if rank.logs)
    return outcome


def train(
    flags: str,
    providers: Providers = GPT,
    *,
    base: str = TINY,
    before: Callable[[Trainer], None] = lambda run: None,
    seconds_ago: float = 0.0,
    defaults: Mapping[str, Any] | None = None,
) -> Outcome:
    """Trains with these flags on this process's rank. `before` may change the run after its setup. The program counts
    as started `seconds_ago`. `defaults` are those of the entry script, as for `pretrain(args_defaults=...)`."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = configure(f"{base} {flags}".split(), None, defaults, launch_environment=LaunchEnvironment(world, False))
    outcome = Outcome()
    with remembered(outcome, before):
        outcome.decision = pretrain_config(config, providers, time.monotonic() - seconds_ago)
    return outcome


def run_script(flags: str, *arguments: Any, base: str = TINY, **keywords: Any) -> Outcome:
    """Calls `pretrain(...)` like a script, in this process, and returns the outcome."""
    outcome = Outcome()
    words = ["script.py", *f"{base} {flags}".split()]
    with remembered(outcome, lambda run: None), mock.patch.object(sys, "argv", words):
        pretrain(*arguments, **keywords)
    return outcome


@contextlib.contextmanager
def remembered(outcome: Outcome, before: Callable[[Trainer], None]) -> Iterator[None]:
    set_up = loop.set_up

    def watched(*arguments: Any) -> Trainer:
        run = set_up(*arguments)
        recorder = _Recorder(run, outcome)
        run.hooks = Hooks([*run.hooks.hooks, recorder])
        run.log.writers = (*run.log.writers, recorder)
        before(run)
        return run

    with mock.patch.object(loop, "set_up", watched):
        yield


def train_on_ranks(flags: str, world_size: int, *, base: str = TINY) -> list[Outcome]:
    """Trains on every rank of a world of processes and returns the outcomes in rank order."""
    return [outcomes[0] for outcomes in train_all_on_ranks([flags], world_size, base=base)]


def train_all_on_ranks(flags: Sequence[str], world_size: int, *, base: str = TINY) -> list[list[Outcome]]:
    """Trains several runs, one after the other, in one world. Returns outcomes by rank, then by run."""
    return run_on_ranks(_train_all, world_size, list(flags), base)


def _train_all(flags: list[str], base: str) -> list[Outcome]:
    return [train(each, base=base) for each in flags]


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Returns the names whose values are not bit-equal in two states."""

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor):
            return isinstance(y, Tensor) and x.dtype == y.dtype and torch.equal(x, y)
        return x == y

    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or not same(a[name], b[name]))


def stream(ranks: Sequence[Outcome]) -> list[int]:
    """Returns sample ids in the order of the run: iteration, micro-batch, data parallel rank, row. Checks that ranks
    which should have the same samples do."""
    replicas = [[rank for rank in ranks if rank.place["dp"] == dp] for dp in range(ranks[-1].place["dp"] + 1)]
    assert all(rank.sample_ids == replica[0].sample_ids for replica in replicas for rank in replica)
    return [
        number
        for iteration in zip(*(replica[0].sample_ids for replica in replicas), strict=True)
        for micro_batches in zip(*iteration, strict=True)
        for rows in micro_batches
        for number in rows
    ]


def write_documents(prefix: Path, documents: int = 300, vocabulary: int = 40, seed: int = 0) -> str:
    """Writes a small corpus of documents of very different lengths, for NullTokenizer --vocab-size 40."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for _ in range(documents):
            length = int(random.choice([1, 2, 3, 5, 20, 60]))
            first, stride = random.integers(vocabulary), random.integers(1, 4)
            words = (first + stride * np.arange(length)) % vocabulary
            builder.add_document(np.append(words, vocabulary), [length + 1])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)
