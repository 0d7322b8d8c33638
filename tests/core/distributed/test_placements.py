"""Every placement of data parallel units trains the model that one process trains, step by step."""

import itertools
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import SmallModel, batch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import FlatOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters import info_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid

SAMPLES, STEPS = 8, 3

PLACEMENTS: dict[str, dict[str, Any]] = {
    "no_shard": {"overlap_grad_reduce": True},
    "optim": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "optim, nothing overlapped": {"use_distributed_optimizer": True},
    "optim_grads": {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "optim_grads, nothing overlapped": {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads",
    },
    "optim_grads_params": {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "optim_grads_params, nothing overlapped": {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
}
SHARDED = [name for name in PLACEMENTS if name != "no_shard"]


def groups_of_world(instances: int = 1) -> ProcessGroupCollection:
    dist = torch.distributed
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return ProcessGroupCollection.from_grid(RankGrid(world, optimizer_instances=instances), rank)


def model_of(dtype: torch.dtype = torch.float64, per_token: bool = False, tied: bool = True) -> SmallModel:
    """All parameters random: norms too."""
    model = SmallModel(dtype=dtype, padded=3, per_token=per_token, tied=tied)
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            noise = torch.randn(layer.norm.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            layer.norm.add_(0.3 * noise)
    return model


def wrapped(
    model: SmallModel, settings: dict[str, Any], instances: int = 1
) -> tuple[DistributedDataParallel, FlatOptimizer]:
    config = DistributedDataParallelConfig(
        **({"grad_reduce_in_fp32": True} | settings), num_distributed_optimizer_instances=instances
    )
    ddp = DistributedDataParallel(model.config, config, model, pg_collection=groups_of_world(instances))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.02, weight_decay=0.1, clip_grad=0.5), [ddp])
    assert isinstance(optimizer, FlatOptimizer)
    return ddp, optimizer


def backward(ddp: DistributedDataParallel, step: int, micro_batches: int, per_token: bool) -> Tensor:
    """This rank's part of a step's samples; returns its number of tokens."""
    place, world = ddp.pg_collection.rank("dp_cp"), ddp.pg_collection.size("dp_cp")
    per = SAMPLES // (world * micro_batches)
    tokens = torch.zeros(())
    for number in range(micro_batches):
        ids, labels, mask = batch(step * SAMPLES + (number * world + place) * per, rows=per)
        loss = ddp(ids, labels, mask) / (1 if per_token else per * micro_batches)
        tokens += mask.sum()
        if number < micro_batches - 1:
            with ddp.no_sync():
                loss.backward()
        else:
            loss.backward()
    return tokens


Trained = dict[str, Any]


def train(
    settings: dict[str, Any],
    instances: int = 1,
    micro_batches: int = 2,
    dtype: torch.dtype = torch.float64,
    per_token: bool = False,
) -> list[Trained]:
    """Norm, zeros, this rank's gradients and weights after each step, in pieces: (name, range) -> values."""
    ddp, optimizer = wrapped(model_of(dtype, per_token), settings, instances)
    seen = []
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        tokens = backward(ddp, step, micro_batches, per_token)
        finalize_model_grads([ddp], tokens if per_token else None)
        gradients = {(c.name, c.range): c.tensor.double().clone() for c in ddp.gradient_chunks()}
        norm = optimizer.step_on_device().grad_norm
        weights = {(c.name, c.range): c.tensor.double().clone() for c in ddp.weight_chunks()}
        seen.append({"norm": float(norm), "gradients": gradients, "weights": weights})
    return seen


def plain_training(per_token: bool) -> list[Trained]:
    """One process, plain autograd, torch's clipping and AdamW."""
    model = model_of(per_token=per_token)
    named = {info_of(p).name: p for p in model.parameters()}
    decayed = [p for p in named.values() if info_of(p).decays]
    rest = [p for p in named.values() if not info_of(p).decays]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    seen = []
    for step in range(STEPS):
        ids, labels, mask = batch(step * SAMPLES, rows=SAMPLES)
        (model(ids, labels, mask) / (mask.sum() if per_token else SAMPLES)).backward()
        gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: p.detach().clone() for name, p in named.items()}
        seen.append({"norm": float(norm), "gradients": gradients, "weights": weights})
    return seen


def joined(ranks: list[dict[tuple[str, tuple[int, int]], Tensor]]) -> dict[str, Tensor]:
    """Whole tensors, flat, from the pieces of all ranks; pieces that several ranks hold are equal to the bit."""
    pieces: dict[str, dict[tuple[int, int], Tensor]] = {}
    for rank in ranks:
        for (name, place), values in rank.items():
            known = pieces.setdefault(name, {}).setdefault(place, values)
            assert torch.equal(known, values), (name, place)
    whole = {}
    for name, parts in pieces.items():
        places = sorted(parts)
        assert places[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(places)), (name, places)
        whole[name] = torch.cat([parts[place] for place in places])
    return whole


def error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    worst = 0.0
    for name, flat in got.items():
        exact = expected[name].flatten()[: flat.numel()].double()
        worst = max(worst, ((flat - exact).norm() / exact.norm()).item())
    return worst


def check(ranks: list[list[Trained]], expected: list[Trained], tolerance: float) -> None:
    for step, exact in enumerate(expected):
        assert len({rank[step]["norm"] for rank in ranks}) == 1
        assert ranks[0][step]["norm"] == pytest.approx(exact["norm"], rel=tolerance)
        for kind in ("gradients", "weights"):
            assert error(joined([rank[step][kind] for rank in ranks]), exact[kind]) < tolerance, (step, kind)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_three_steps_equal_those_of_one_process(name: str, per_token: bool) -> None:
    ranks = run_on_ranks(train, 2, PLACEMENTS[name], 1, 2, torch.float64, per_token)
    check(ranks, plain_training(per_token), 1e-11)


@pytest.mark.parametrize("name", [name for name in SHARDED if "nothing" not in name])
def test_replicas_of_shards_do_too(name: str) -> None:
    check(run_on_ranks(train, 4, PLACEMENTS[name], 2, 1), plain_training(False), 1e-11)
