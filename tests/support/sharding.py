"""A small model under every data parallel sharding strategy, for tests that all strategies must pass."""

from typing import Any

import torch
from support.small_models import SmallModel, batch
from torch import Tensor

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.optimizer import FlatOptimizer, OptimizerConfig, get_megatron_optimizer

SAMPLES = 8
"""Samples of a step."""

_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_FULL = {"use_megatron_fsdp": True}

STRATEGIES: dict[str, dict[str, Any]] = {
    "no_shard": {"overlap_grad_reduce": True},
    "optim": {"use_distributed_optimizer": True, **_OVERLAP},
    "optim_grads": {**_FULL, "data_parallel_sharding_strategy": "optim_grads", **_OVERLAP},
    "optim_grads_params": {**_FULL, "data_parallel_sharding_strategy": "optim_grads_params", **_OVERLAP},
    "optim, plain": {"use_distributed_optimizer": True},
    "optim_grads, plain": {**_FULL, "data_parallel_sharding_strategy": "optim_grads"},
    "optim_grads_params, plain": {**_FULL, "data_parallel_sharding_strategy": "optim_grads_params"},
}
"""Settings of DistributedDataParallelConfig. Those named `plain` overlap no communication."""

SlicesByName = dict[tuple[str, tuple[int, int]], Tensor]
"""Values that a rank holds, by (name, range of elements in the box)."""


def groups_of(ranks: int, instances: int = 1, **sizes: int) -> ProcessGroupCollection:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return ProcessGroupCollection.from_grid(RankGrid(ranks, optimizer_instances=instances, **sizes), rank)


def small_model(dtype: torch.dtype = torch.float64, per_token: bool = False, tied: bool = True) -> SmallModel:
    """Returns a model with random parameters, also in norms."""
    model = SmallModel(dtype=dtype, padded=3, per_token=per_token, tied=tied)
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            noise = torch.randn(layer.norm.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            layer.norm.add_(0.3 * noise)
    return model


def wrap(
    model: SmallModel, groups: ProcessGroupCollection, instances: int = 1, **settings: Any
) -> tuple[DistributedDataParallel, FlatOptimizer]:
    chosen = {"grad_reduce_in_fp32": True, "num_distributed_optimizer_instances": instances} | settings
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(**chosen), model, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.02, weight_decay=0.1, clip_grad=0.5), [ddp])
    assert isinstance(optimizer, FlatOptimizer)
    return ddp, optimizer


def backward(ddp: DistributedDataParallel, step: int, micro_batches: int, per_token: bool = False) -> Tensor:
    """Runs forward and backward for this rank's samples of a step. Returns their number of tokens."""
    place, ranks = ddp.pg_collection.rank("dp_cp"), ddp.pg_collection.size("dp_cp")
    per = SAMPLES // (ranks * micro_batches)
    tokens = torch.zeros(())
    for number in range(micro_batches):
        ids, labels, mask = batch(step * SAMPLES + (number * ranks + place) * per, rows=per)
        loss = ddp(ids, labels, mask) / (1 if per_token else per * micro_batches)
        tokens += mask.sum()
        if number < micro_batches - 1:
            with ddp.no_sync():
                loss.backward()
        else:
            loss.backward()
    return tokens


def slices(chunks: "list[Chunk] | Any") -> SlicesByName:
    return {(chunk.name, chunk.range): chunk.tensor.double().clone() for chunk in chunks}


def joined(ranks: list[SlicesByName]) -> dict[str, Tensor]:
    """Joins the slices of all ranks into whole flat tensors. Checks that replicas are bit-equal and all is there."""
    found: dict[str, dict[tuple[int, int], Tensor]] = {}
    for rank in ranks:
        for (name, place), values in rank.items():
            known = found.setdefault(name, {}).setdefault(place, values)
            assert torch.equal(known, values), (name, place)
    whole = {}
    for name, parts in found.items():
        end = 0
        for begin, stop in sorted(parts):
            assert begin == end, (name, sorted(parts))
            end = stop
        whole[name] = torch.cat([parts[place] for place in sorted(parts)])
    return whole
