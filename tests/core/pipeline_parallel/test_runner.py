"""Pipelines on real processes against one process, float64: losses and the gradient of every parameter."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from core.pipeline_parallel.stage_models import LENGTH, StageModel, batch, config, whole_model
from support.processes import run_on_ranks
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.stages import stage_map
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid


def loss_func(mask: Tensor, total: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return total, mask.sum().to(torch.int), {"lm loss": torch.stack([total.detach(), mask.sum()])}


def forward_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    ids, labels, mask = next(data)
    return model(ids, labels, mask), partial(loss_func, mask)


def expected(count: int, num_layers: int = 8, lengths: Any = None) -> tuple[dict[str, Tensor], list[float]]:
    """Plain autograd over the definition of the step's loss."""
    model = whole_model(num_layers)
    parts = [batch(number, length=lengths[number] if lengths else LENGTH) for number in range(count)]
    sums = [(model(*part), part[2].sum()) for part in parts]
    (sum(total / tokens for total, tokens in sums) / count).backward()  # type: ignore[union-attr]
    return {p.info.name: p.grad for p in model.parameters()}, [total.item() for total, _ in sums]  # type: ignore[attr-defined]


def run_cases(cases: list[tuple[int, dict[str, Any]]]) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Every case on this rank: gradients by name, and reported sums of losses."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(world, pipeline=world), rank)
    return [run_case(groups, count, dict(fields)) for count, fields in cases]


def run_case(
    groups: ProcessGroupCollection, count: int, fields: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float]]:
    lengths, bare = fields.pop("lengths", None), fields.pop("bare", False)
    settings = config(pipeline_model_parallel_size=groups.size("pp"), **fields)
    stages = stage_map(settings)
    models = [StageModel(settings, stages.part(groups.rank("pp"), chunk)) for chunk in range(stages.chunks)]
    chunks: list[nn.Module] = list(models)
    if not bare:
        settings.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig()
        chunks = [DistributedDataParallel(settings, ddp, model, pg_collection=groups) for model in models]
    parts = [batch(number, length=lengths[number] if lengths else LENGTH) for number in range(count)]
    reports = get_forward_backward_func(groups.size("pp"), stages.chunks)(
        forward_step_func=forward_step,
        data_iterator=[iter(parts) for _ in chunks],
        model=chunks,
        num_microbatches=count,
        seq_length=LENGTH,
        micro_batch_size=2,
        pg_collection=groups,
    )
    gradients = {
        p.info.name: (p.grad if bare else p.main_grad).clone()
        for model in models
        for p in model.parameters()  # type: ignore[union-attr]
    }
    return gradients, [float(report["lm loss"][0]) for report in reports]


SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "interleaved": {"virtual_pipeline_model_parallel_size": 2},
    "zb-v": {"pipeline_schedule": "zb-v"},
}


@pytest.mark.parametrize("world", [2, 4])
def test_all_schedules_compute_what_one_process_does(world: int) -> None:
    counts = (1, 3, 6)
    cases = [(count, fields) for count in counts for fields in SCHEDULES.values()]
    cases += [(5, {**fields, "overlap_p2p_comm": False}) for fields in SCHEDULES.values()]
    cases += [(5, {**fields, "bare": True}) for fields in SCHEDULES.values()]
    lengths = [3, 7, 4, 6, 2]
    cases += [(5, {**fields, "variable_seq_lengths": True, "lengths": lengths}) for fields in SCHEDULES.values()]
    if world == 2:
        cases += [
            (5, {"num_layers_in_first_pipeline_stage": 6}),
            (5, {"pipeline_model_parallel_layout": "E|tt|t*5|tL"}),
            (5, {"pipeline_model_parallel_layout": "E|tt|t*5|tL", "pipeline_schedule": "zb-v"}),
            (7, {"virtual_pipeline_model_parallel_size": 4, "microbatch_group_size_per_vp_stage": 3}),
        ]
    check(cases, run_on_ranks(run_cases, world, cases))


def check(cases: list[Any], results: list[Any]) -> None:
    for place, (count, fields) in enumerate(cases):
        gradients, losses = expected(count, lengths=fields.get("lengths"))
        found: dict[str, Tensor] = {}
        for rank in results:
            found |= rank[place][0]
        assert found.keys() == gradients.keys(), fields
        error = max(((found[name] - gradients[name]).norm() / gradients[name].norm()).item() for name in gradients)
        assert error < 1e-12, (count, fields)
        loss_rank = 0 if fields.get("pipeline_schedule") == "zb-v" else len(results) - 1
        for rank, result in enumerate(results):
            assert result[place][1] == (pytest.approx(losses, rel=1e-13) if rank == loss_rank else []), (rank, fields)
