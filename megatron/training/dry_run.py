"""--dry-run: what a run would be, without process groups, devices or memory.

The model is built on the meta device by the same piece that builds it in earnest, and its units are planned by the same
function, so what is printed is what a run allocates, padding and alignment included; there is no second formula.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Blend, normalize, parse_split
from megatron.core.distributed.units import UnitPlan, plan_units
from megatron.core.exceptions import UserError
from megatron.core.num_microbatches_calculator import BatchSchedule
from megatron.core.optimizer.update_rules import build_update_rule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid
from megatron.training.arguments import exit_with_problems
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.gpt_data import blends
from megatron.training.initialize import Environment
from megatron.training.logging.flops import ModelShape, training_flops
from megatron.training.pieces import Context, Pieces, Stage
from megatron.training.print_config import config_lines
from megatron.training.state import TrainState
from megatron.training.tokenizer.base import Tokenizer
from megatron.training.tokenizer.build import build_tokenizer, padded_vocab_size


@dataclass(frozen=True)
class MemoryOfRank:
    """Bytes that a rank keeps from step to step, activations aside."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Passes:
    """How often a run goes over one data set."""

    name: str
    tokens: int
    """Tokens of its part for training."""
    epochs: float | None
    """None: the length of training is not given."""


@dataclass(frozen=True)
class DryRun:
    """What a run would be."""

    parameters: int
    """Of the whole model, without what pads the vocabulary."""
    vocab_size: int
    padded_vocab_size: int
    memory: MemoryOfRank
    tokens_per_step: int
    microbatches_per_step: int
    flops_per_step: int
    data: tuple[Passes, ...]


def dry_run(config: PretrainConfig, pieces: Pieces) -> DryRun:
    """Find out what the run would be. Raises UserError when its tokenizer, model or data cannot be made."""
    tokenizer = build_tokenizer(config.tokenizer)
    plans = _planned_units(config, pieces, tokenizer)
    training, length = config.training, config.data.seq_length
    padded = padded_vocab_size(
        tokenizer.vocab_size,
        config.model.make_vocab_size_divisible_by,
        config.transformer.tensor_model_parallel_size,
    )
    shape = ModelShape.from_config(config.transformer, padded_vocab_size=padded, seq_length=length)
    return DryRun(
        parameters=sum(slot.info.box.numel for plan in plans for slot in plan.slots),
        vocab_size=tokenizer.vocab_size,
        padded_vocab_size=padded,
        memory=memory_of(plans, len(build_update_rule(config.optimizer).moments)),
        tokens_per_step=training.global_batch_size * length,
        microbatches_per_step=BatchSchedule.from_config(training, config.grid.data).final_num_microbatches,
        flops_per_step=training_flops(shape, training.global_batch_size),
        data=tuple(_passes_over_data(config)),
    )


def _planned_units(config: PretrainConfig, pieces: Pieces, tokenizer: Tokenizer) -> list[UnitPlan]:
    groups = ProcessGroupCollection.from_grid(RankGrid(1), 0)
    environment = Environment(0, config.world_size, torch.device("meta"), groups)
    with torch.device("meta"):
        model = pieces.build_model(Context(config, environment, tokenizer, TrainState()), Stage())
    return plan_units(model)


def memory_of(plans: Sequence[UnitPlan], moments: int) -> MemoryOfRank:
    """What flat buffers of planned units take, with an optimizer that keeps so many moments."""
    weights = gradients = optimizer = 0
    for plan in plans:
        weights += plan.numel * plan.dtype.itemsize
        gradients += plan.numel * plan.main_dtype.itemsize
        optimizer += plan.numel * plan.main_dtype.itemsize * (moments + plan.needs_main_weights)
    return MemoryOfRank(weights, gradients, optimizer)


# ---------------------------------------------------------------------------------------------------------------------
# Data


def _passes_over_data(config: PretrainConfig) -> Iterator[Passes]:
    blend, per_split = blends(config)
    share = 1.0
    if per_split is not None:
        blend = per_split[0]
    elif config.data.split is not None:
        share = parse_split(config.data.split)[0]
    if blend is not None:
        yield from _passes_over(blend, share, tokens_to_train_on(config))


def _passes_over(blend: Blend, share: float, wanted: int | None) -> Iterator[Passes]:
    prefixes, weights = blend
    sizes = [int(IndexedDataset(prefix).sequence_lengths.sum() * share) for prefix in prefixes]
    parts = normalize(weights if weights is not None else sizes)
    for prefix, size, part in zip(prefixes, sizes, parts, strict=True):
        yield Passes(prefix, size, None if wanted is None or size == 0 else wanted * part / size)


def tokens_to_train_on(config: PretrainConfig) -> int | None:
    """Tokens of the whole run; None if its length is not given."""
    training, length = config.training, config.data.seq_length
    if training.train_samples is not None:
        return training.train_samples * length
    return training.train_iters * training.global_batch_size * length or None


# ---------------------------------------------------------------------------------------------------------------------
# Words


def print_dry_run(config: PretrainConfig, pieces: Pieces) -> None:
    """Print what is to be said about the flags, the settings with --print-config, and what the run would be.

    Where the run could not be made, prints why to stderr and exits with code 2.
    """
    try:
        run = dry_run(config, pieces)
    except UserError as error:
        exit_with_problems(error)
    print(*config.notes, *(config_lines(config) if config.training.print_config else ()), sep="\n")
    print(*report_lines(config, run), sep="\n", flush=True)


def report_lines(config: PretrainConfig, run: DryRun) -> Iterator[str]:
    """The dry run for people."""
    transformer, training, grid = config.transformer, config.training, config.grid
    yield (
        f"model       {transformer.num_layers} layers, hidden size {transformer.hidden_size}, "
        f"{transformer.num_attention_heads} heads, {config.data.seq_length} tokens a sample"
    )
    yield f"parameters  {run.parameters:,}; vocabulary {run.vocab_size:,}, stored as {run.padded_vocab_size:,}"
    yield (
        f"ranks       {config.world_size} = tensor {grid.tensor} x pipeline {grid.pipeline} x context {grid.context} "
        f"x data {grid.data}"
    )
    yield (
        f"a step      {training.global_batch_size:,} samples = {run.tokens_per_step:,} tokens, "
        f"{run.microbatches_per_step} micro-batches of {training.micro_batch_size} on each rank, "
        f"{run.flops_per_step / 1e12:,.4g} TFLOP"
    )
    total = tokens_to_train_on(config)
    yield "training    " + (f"{training.train_iters:,} steps, {total:,} tokens" if total else "of no length yet")
    if config.data.mock_data:
        yield "data        made up"
    for passes in run.data:
        epochs = "" if passes.epochs is None else f"{passes.epochs:.3g} epochs over "
        yield f"data        {epochs}{passes.tokens:,} tokens of {passes.name}"
    memory = run.memory
    yield (
        f"memory      {size_text(memory.total)} on each rank: weights {size_text(memory.weights)}, gradients "
        f"{size_text(memory.gradients)}, optimizer {size_text(memory.optimizer)}; activations come on top"
    )


def size_text(count: int) -> str:
    """Bytes, exactly and in a unit that can be read."""
    value, unit = float(count), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count:,} bytes" if unit == "bytes" else f"{value:.2f} {unit} ({count:,} bytes)"
