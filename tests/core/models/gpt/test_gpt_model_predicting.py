"""A GPT that predicts several tokens ahead, over tensor, context and pipeline parallel ranks, against one process.

A step of two micro-batches through the library's own schedules, in float64: losses, reports, and the gradient of every
parameter on every rank, copies of embeddings included.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from support.boxes import fill, whole_values
from support.pool import Pool
from support.predicting_gpt import (
    LLAMA,
    ROPE,
    TIED,
    predicting_config,
    predicting_model,
    randomize,
    tokens_of,
    whole_batch,
)
from torch import Tensor, nn

from megatron.core.context_parallel import cut_rows, sequence_part
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.pipeline_parallel.stages import embedding_ranks
from megatron.core.transformer.layer_metrics import take_layer_metrics

MICRO_BATCHES = 2


@dataclass(frozen=True)
class Model:
    settings: dict[str, Any] = field(default_factory=dict)
    keywords: dict[str, Any] = field(default_factory=dict)
    packed: bool = False


MODELS = {
    "learned, tied": Model({"hidden_dropout": 0.2}, TIED),
    "learned": Model({"calculate_per_token_loss": True}),
    "llama, packed": Model(LLAMA, ROPE, packed=True),
    "llama, tied": Model(LLAMA | {"num_layers": 4, "hidden_dropout": 0.1}, ROPE | TIED),
}


def tensor(ranks: int, sequence_parallel: bool = False) -> dict[str, Any]:
    return {"tensor_model_parallel_size": ranks, "sequence_parallel": sequence_parallel}


def stages(ranks: int, layout: str | None = None, **more: Any) -> dict[str, Any]:
    return {"pipeline_model_parallel_size": ranks, "pipeline_model_parallel_layout": layout, **more}


# name: (model, layout)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def groups_of(config: Any, tied: bool, rank: int) -> ProcessGroupCollection:
    sizes = {
        "tensor": config.tensor_model_parallel_size,
        "context": config.context_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
    }
    world = sizes["tensor"] * sizes["context"] * sizes["pipeline"]
    words, places = embedding_ranks(config, shared_with_head=tied), embedding_ranks(config, shared_with_head=False)
    return ProcessGroupCollection.from_grid(
        RankGrid(world, **sizes),
        rank,
        embedding_ranks=lambda ranks: [ranks[place] for place in words],
        position_embedding_ranks=lambda ranks: [ranks[place] for place in places],
    )


def step(name: str, layout: dict[str, Any], values: dict[str, Tensor] | None, rank: int = 0) -> tuple[list, dict, dict]:
    """What one rank has after a step: reports of the loss, sums reported by depth, its parameters and gradients."""
    model = MODELS[name]
    config = predicting_config(**{**model.settings, **layout}, finalize_model_grads_func=finalize_model_grads)
    groups = groups_of(config, bool(model.keywords.get("share_embeddings_and_output_weights")), rank)
    part = sequence_part(groups)
    plan, chunks = stage_map(config), []
    for number in range(plan.chunks):
        stage = plan.stage_at(groups.rank("pp"), number)
        place = {"pre_process": stage.embedding, "post_process": stage.loss}
        chunk = predicting_model(config, groups, number if plan.chunks > 1 else None, **place, **model.keywords)
        if values is None:
            randomize(chunk)
        else:
            fill(chunk, values)
        chunks.append(chunk)
    start = {} if values is not None else whole_values(chunks[0])
    ddp = DistributedDataParallelConfig()
    wrapped = [DistributedDataParallel(config, ddp, chunk, pg_collection=groups) for chunk in chunks]

    def forward_step(numbers: Iterator[int], chunk: nn.Module) -> tuple[Tensor, Any]:
        ids, labels, mask = whole_batch(model.packed, next(numbers))
        if part is not None:
            ids, labels, mask = (cut_rows(row, part, 1) for row in (ids, labels, mask))
        losses = chunk(ids, labels=labels, loss_mask=mask, tokens=tokens_of(model.packed, part))
        return losses, partial(loss_func, mask.double())

    def loss_func(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total, count = (losses * mask).sum(), mask.sum()
        return total, count, torch.stack([total.detach(), count])

    numbers = [iter(range(MICRO_BATCHES)) for _ in chunks]
    reports = get_forward_backward_func(groups.size("pp"), len(chunks))(
        forward_step_func=forward_step,
        data_iterator=numbers if len(chunks) > 1 else numbers[0],
        model=wrapped if len(chunks) > 1 else wrapped[0],
        num_microbatches=MICRO_BATCHES,
        seq_length=32 if model.packed else 16,
        micro_batch_size=1 if model.packed else 2,
        pg_collection=groups,
    )
    depths = {report.name: torch.stack([report.total, report.count]) for report in take_layer_metrics(chunks)}
    for total in (*reports, *depths.values()):
        if groups.size("cp") > 1:
            torch.distributed.all_reduce(total, group=groups.cp)
    found = {(number, n): p for number, chunk in enumerate(chunks) for n, p in chunk.named_parameters()}
    gradients = {key: (p, p.main_grad) for key, p in found.items()}
    groups.close()
    return list(reports), {**depths, "start": start}, gradients


def test_who_holds_a_copy_needs_a_group() -> None:
    """Groups as they are made for models that predict one token."""
    config = predicting_config(**stages(4, "Et|t|mm|L"))
    groups = ProcessGroupCollection.from_grid(RankGrid(4, pipeline=4), 2)
    with pytest.raises(UserError, match=r"embedding.word_embeddings.weight is also on this pipeline stage.*embd"):
        predicting_model(config, groups, pre_process=False, post_process=False)
    groups = ProcessGroupCollection.from_grid(RankGrid(2, pipeline=2), 1)
    with pytest.raises(UserError, match=r"position_embeddings.weight .*\(get_position_embedding_ranks=...\)"):
        predicting_model(predicting_config(**stages(2)), groups, pre_process=False)


def test_a_stage_behind_knows_its_tokens_by_what_it_gets() -> None:
    """Without ids and a record of the tokens: a third of the hidden states are the decoder's."""
    config = predicting_config(**stages(4, "Et|t|mm|L"))
    groups = ProcessGroupCollection.from_grid(RankGrid(4, pipeline=4), 3)
    model = predicting_model(config, groups, pre_process=False)
    hidden = torch.randn(3 * 16, 2, 16, dtype=torch.float64, requires_grad=True)
    labels = whole_batch()[1]
    model.set_input_tensor(hidden)
    losses = model(None, labels=labels)
    assert losses.shape == (2, 16) and [report.name for report in take_layer_metrics([model])] == [
        "mtp_1 loss",
        "mtp_2 loss",
    ]
    losses.sum().backward()
    assert all(part.abs().sum() > 0 for part in hidden.grad.chunk(3))
