"""Trains one rank of a cell for a few steps through the library's public functions, on any device."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parity.cells import Cell
from parity.evidence import Evidence, Step, TensorSlice, reports_of, slices, watched_masks
from parity.kinds import Chunk, build_model, kind_of, on_device
from parity.models import LENGTH, OPTIMIZER, transformer_config
from parity.text import GLOBAL_BATCH, documents, lengths_of_documents
from torch import Tensor, nn

from megatron.core.context_parallel import sequence_part
from megatron.core.context_parallel.regrouping import SharedMicroBatch, padded_length, regroup
from megatron.core.dist_checkpointing.chunk import Chunk as TensorChunk
from megatron.core.dist_checkpointing.chunk import parameter_chunk
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters import canonical_names
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.stage_map import StageMap, stage_map
from megatron.core.pipeline_parallel.stages import decoder_ranks, embedding_ranks, encoder_ranks
from megatron.core.transformer.layer_costs import stages_of_auto_layout
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Precision:
    """Number formats of a run."""

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of TransformerConfig; empty for float64."""
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of OptimizerConfig."""


FLOAT64 = Precision()


@dataclass
class Parts:
    """Model chunks, optimizer and records of one rank of a cell, ready to train."""

    cell: Cell
    config: TransformerConfig
    groups: ProcessGroupCollection
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    evidence: Evidence
    device: torch.device
    plain: list[nn.Module]
    """The model chunks without DistributedDataParallel."""

    @property
    def replicas(self) -> int:
        return self.groups.size("dp")

    def micro_batches(self, step: int) -> list[Any]:
        """The micro-batches of this rank: their first samples, or with dynamic context parallelism their documents."""
        if self.cell.layout.is_dynamic:
            return documents_of_rank(self, step)
        count = GLOBAL_BATCH // (self.replicas * self.cell.rows)
        return [(n * self.replicas + self.groups.rank("dp")) * self.cell.rows for n in range(count)]


def groups_of(cell: Cell, rank: int, config: TransformerConfig) -> ProcessGroupCollection:
    """Builds the process groups of one rank of a cell. A cell of n ranks uses ranks 0 .. n-1 of a larger world."""
    layout = cell.layout
    sizes = {"tensor": layout.tensor.ranks, "context": layout.context.ranks, "pipeline": layout.pipeline.ranks}
    experts = {"expert": config.expert_model_parallel_size, "expert_tensor": config.expert_tensor_parallel_size}
    instances = layout.data.ddp.get("num_distributed_optimizer_instances", 1)
    grid = RankGrid(layout.ranks, **sizes, **experts, order=layout.order, optimizer_instances=instances)
    # As in Megatron-LM, without multi-token prediction the embedding group includes the head's rank even if the two
    # weights are not tied.
    copied = cell.model.predicting or config.num_encoder_layers
    words = embedding_ranks(config, shared_with_head=cell.model.tied or not copied)
    positions = embedding_ranks(config, shared_with_head=False)
    return ProcessGroupCollection.from_grid(
        grid,
        rank,
        hierarchical_context_sizes=layout.context.levels,
        embedding_ranks=lambda ranks: [ranks[place] for place in words],
        position_embedding_ranks=lambda ranks: [ranks[place] for place in positions],
        encoder_ranks=lambda ranks: [ranks[place] for place in encoder_ranks(config)],
        decoder_ranks=lambda ranks: [ranks[place] for place in decoder_ranks(config)],
    )


def prepare(cell: Cell, device: torch.device, precision: Precision) -> Parts:
    """Builds the wrapped model chunks of this rank and their optimizer."""
    config = transformer_config(
        cell.model, cell.layers, **cell.layout.settings, **precision.settings, calculate_per_token_loss=cell.per_token
    )
    lengths = kind_of(cell.model).shapes(cell.model, cell.rows)
    stages_of_auto = stages_of_auto_layout(config, LENGTH, cell.model.vocabulary, lengths.get("decoder_seq_length"))
    if stages_of_auto is not None:
        config = dataclasses.replace(config, pipeline_model_parallel_layout=stages_of_auto)
    groups = groups_of(cell, dist.get_rank() if dist.is_initialized() else 0, config)
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    stages: StageMap = stage_map(config)
    plain: list[nn.Module] = []
    initial: list[TensorSlice] = []
    for number in range(cell.layout.pipeline.chunks):
        part = stages.stage_at(groups.rank("pp"), number)
        virtual = number if cell.layout.pipeline.chunks > 1 else None
        place = Chunk(groups, part.embedding, part.loss, virtual)
        chunk = build_model(cell.model, config, place).to(device)
        initial += slices(parameter_chunk(parameter) for _, parameter in canonical_names(chunk))
        plain.append(chunk)
    wrapped = [
        DistributedDataParallel(
            config,
            cell.layout.ddp_config(grad_reduce_in_fp32=True),
            chunk,
            pg_collection=groups,
        )
        for chunk in plain
    ]
    optimizer_config = OptimizerConfig(**{**OPTIMIZER, **precision.optimizer})
    optimizer = get_megatron_optimizer(optimizer_config, wrapped, pg_collection=groups)
    # Ranks whose losses are parts of one sum: those of a row, or all that documents are divided among.
    evidence = Evidence(initial, context=groups.rank("dp_cp" if cell.layout.is_dynamic else "cp"))
    return Parts(cell, config, groups, wrapped, optimizer, evidence, device, plain)


def train(
    cell: Cell,
    steps: int = 3,
    device: str = "cpu",
    precision: Precision = FLOAT64,
    lean: bool = False,
    further: int = 0,
) -> Evidence:
    """Trains this rank of a cell and returns what it recorded. With `lean` it records only losses and norms.

    `further`: number of steps after those; their losses and norms alone are recorded, in `Evidence.further`.
    """
    parts = prepare(cell, torch.device(device), precision)
    evidence = parts.evidence
    try:
        for number in range(steps):
            with watched_masks(parts.plain, evidence.masks) if number == 0 and not lean else nullcontext():
                evidence.steps.append(_step(parts, number, lean))
        if not lean:
            evidence.weights = slices(_weight_chunks(parts))
            evidence.norm_of_ones = norm_of_ones(parts)
        evidence.further = [_step(parts, steps + number, lean=True) for number in range(further)]
    finally:
        parts.groups.close()
    return evidence


def _step(parts: Parts, number: int, lean: bool) -> Step:
    for chunk in parts.chunks:
        chunk.zero_grad_buffer()
    losses = _micro_batches(parts, number)
    gradients = [] if lean else slices(_gradient_chunks(parts))
    reports = reports_of(parts.plain)
    update = parts.optimizer.step_on_device()
    assert bool(update.update_applied)
    return Step(losses, gradients, float(update.grad_norm), reports)


def _micro_batches(parts: Parts, step: int) -> dict[int, Tensor]:
    """Forward and backward of all micro-batches of a step; the losses of those that this rank knows one of."""
    cell, groups = parts.cell, parts.groups
    first = parts.micro_batches(step)
    forward_step = partial(_forward_step, parts, step)
    virtual = len(parts.chunks) > 1
    reports = get_forward_backward_func(groups.size("pp"), len(parts.chunks) if virtual else None)(
        forward_step_func=forward_step,
        data_iterator=[iter(first) for _ in parts.chunks] if virtual else iter(first),
        model=parts.chunks if virtual else parts.chunks[0],
        num_microbatches=len(first),
        **kind_of(cell.model).shapes(cell.model, cell.rows),
        pg_collection=groups,
    )
    if cell.layout.is_dynamic:
        return {0: torch.stack([report.cpu() for _, report in reports]).sum(0)}
    return {sample: report.cpu() for sample, report in reports}


def documents_of_rank(parts: Parts, step: int) -> list[SharedMicroBatch]:
    """Returns the micro-batches that this rank shares with others or has alone. Every rank has one in each step."""
    groups, lengths = parts.groups, lengths_of_documents(parts.cell.model, step)
    rank, ranks = groups.rank("dp_cp"), groups.size("dp_cp")
    plan = regroup(lengths, ranks, parts.cell.layout.room, 4)
    return [each for each in plan if each.first_rank <= rank < each.first_rank + each.num_ranks]


def _forward_step(
    parts: Parts, step: int, samples: Iterator[int], chunk: nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    sample, kind = next(samples), kind_of(parts.cell.model)
    batch = on_device(_batch(parts, step, sample), parts.device)
    output = kind.forward(chunk, batch)

    def loss_func(output: Any) -> tuple[Any, ...]:
        *loss, report = kind.loss(output, batch)
        return *loss, (sample, report)

    return output, loss_func


def _batch(parts: Parts, step: int, sample: Any) -> Any:
    model, groups = parts.cell.model, parts.groups
    if not isinstance(sample, SharedMicroBatch):
        part = (groups.rank("cp"), groups.size("cp"))
        return kind_of(model).micro_batch(model, step, sample, part, parts.cell.rows)
    lengths, shared = lengths_of_documents(model, step), sequence_part(groups, sample.num_ranks)
    multiple = groups.size("tp") if parts.config.sequence_parallel else 1
    length = padded_length(sum(lengths[number] for number in sample.documents), sample.num_ranks, multiple)
    place = (0, 1) if shared is None else (shared.rank, shared.size)
    return documents(model, step, sample.documents, length, place, None if shared is None else shared.group)


def _weight_chunks(parts: Parts) -> Iterable[TensorChunk]:
    for chunk in parts.chunks:
        chunk.start_param_sync(force_sync=True)  # twice does no harm
        yield from chunk.weight_chunks()


def _gradient_chunks(parts: Parts) -> Iterable[TensorChunk]:
    for chunk in parts.chunks:
        yield from chunk.gradient_chunks()


def norm_of_ones(parts: Parts) -> float:
    """Returns the gradient norm that the optimizer computes when every gradient element is set to one."""
    with torch.no_grad():
        for chunk in _gradient_chunks(parts):
            chunk.tensor.fill_(1.0)
    return float(parts.optimizer.get_grad_norm())
