"""The part of a step that belongs to whole steps: gradients over data parallel ranks, the update, gathered weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.core.distributed.sharding_strategy import ShardingStrategy, sharding_strategy_of
from megatron.core.optimizer.gram_newton_schulz import operations
from megatron.diagnosis.planning.cluster import Cluster
from megatron.diagnosis.planning.exposed import slowed_by
from megatron.diagnosis.planning.figures import Figure, total
from megatron.diagnosis.planning.gpus import Gpu
from megatron.diagnosis.planning.kernel_time import elementwise_rate
from megatron.training.config.pretrain_config import PretrainConfig


@dataclass(frozen=True)
class RankWeights:
    """The elements of weights on one rank."""

    dense: float
    experts: float
    largest_unit: float
    """Elements of the unit that is reduced last and gathered first: the embedding, or a layer."""
    frozen_dense: float = 0.0
    """Elements of frozen weights, which sharded parameters gather too. The others are trained."""
    frozen_experts: float = 0.0


@dataclass(frozen=True)
class StepEnd:
    """Seconds that a step spends beyond its micro-batches."""

    exposed: Figure
    """Communication of data parallel ranks that nothing hides."""
    update: Figure
    """Norm of the gradients, clipping and update."""


def step_end(
    run: PretrainConfig,
    cluster: Cluster,
    weights: RankWeights,
    rank: int,
    last_backward: float,
    first_forward: float,
    micro_batches: int,
) -> StepEnd:
    """Returns what a rank adds to its micro-batches. `last_backward` and `first_forward` are the seconds of computation
    that may hide communication."""
    grid = run.grid
    dense, experts = grid.named_group("dp_cp", rank), grid.named_group("expt_dp", rank) if weights.experts else (rank,)
    strategy = sharding_strategy_of(run.ddp)
    exposed = _communication(
        run, cluster, weights, (dense, experts), strategy, last_backward, first_forward, micro_batches
    )
    instances = run.ddp.num_distributed_optimizer_instances
    shards = [max(1, len(ranks) // instances) if strategy.shards_state else 1 for ranks in (dense, experts)]
    own = weights.dense / shards[0] + weights.experts / shards[1]
    return StepEnd(exposed, elementwise_rate(cluster.gpu).per(own * bytes_of_update(run)))


_MUON = Figure(0.5, "estimate from the kernels of two rows with muon in benchmarks/results/h200.json", 0.3)
"""Part of a GPU's peak at which Muon's products take place. It contains what they cost the steps around them: a GPU at
its limit of power lowers its clock."""


def muon_products(run: PretrainConfig, gpu: Gpu, matrices: Mapping[tuple[int, int], int], rank: int) -> Figure:
    """Returns the time in which Muon orthogonalises the updates of a rank's matrices [rows, columns], by number."""
    steps = run.optimizer.muon_num_ns_steps
    flops = sum(count * operations(rows, columns, steps) for (rows, columns), count in matrices.items())
    strategy = sharding_strategy_of(run.ddp)
    shards = len(run.grid.named_group("dp_cp", rank)) if strategy.shards_state else 1
    seconds = flops / shards / (_MUON.value * gpu.bf16_peak.value)
    return Figure(seconds, f"{_MUON.source}; {gpu.bf16_peak.source}", _MUON.error + gpu.bf16_peak.error)


def bytes_of_update(run: PretrainConfig) -> int:
    """Returns the bytes that the norm of the gradients and the update move for each weight: both read the gradient, the
    update reads and writes its state and writes the weight."""
    optimizer = run.optimizer
    weight, gradient = optimizer.params_dtype.itemsize, run.ddp.main_grads_dtype.itemsize
    moments = 2 if optimizer.optimizer == "adam" else 1
    if optimizer.use_precision_aware_optimizer:
        kept = optimizer.exp_avg_dtype.itemsize + (optimizer.exp_avg_sq_dtype.itemsize if moments == 2 else 0)
        remainders = optimizer.main_params_dtype == torch.float32 and weight == 2
        main = 2 if remainders else optimizer.main_params_dtype.itemsize
    else:
        kept, main = 4 * moments, 4 if weight < 4 else 0
    return 2 * gradient + 2 * (kept + main) + weight


def _communication(
    run: PretrainConfig,
    cluster: Cluster,
    weights: RankWeights,
    groups: Sequence[Sequence[int]],
    strategy: ShardingStrategy,
    last_backward: float,
    first_forward: float,
    micro_batches: int,
) -> Figure:
    """Returns the exposed time. An all-reduce is a reduce-scatter and an all-gather of gradients; with sharded state
    the weights are gathered in its place."""
    item = run.optimizer.params_dtype.itemsize
    reduced = run.ddp.main_grads_dtype.itemsize if run.ddp.grad_reduce_in_fp32 else item
    sizes = gathered = (weights.dense, weights.experts)
    if strategy.shards_weights:
        gathered = (weights.dense + weights.frozen_dense, weights.experts + weights.frozen_experts)
    reduce = total(cluster.gather_seconds(size * reduced, group) for size, group in zip(sizes, groups, strict=True))
    second = item if strategy.shards_state else reduced
    gather = total(cluster.gather_seconds(size * second, group) for size, group in zip(gathered, groups, strict=True))
    if not reduce.value:
        return Figure(0.0, "no data parallel ranks")
    share = weights.largest_unit / max(1.0, sum(gathered))
    if strategy.shards_weights:
        # Each micro-batch gathers the weights for forward and for backward and reduces the gradients.
        parts = [
            *_overlapped(gather, first_forward, share, run.ddp.overlap_param_gather),
            *_overlapped(total([gather, reduce]), last_backward, share, run.ddp.overlap_grad_reduce),
        ]
        return total(part.times(micro_batches) for part in parts)
    if not strategy.shards_state:
        return total(_overlapped(total([reduce, gather]), last_backward, share, run.ddp.overlap_grad_reduce))
    return total(
        [
            *_overlapped(reduce, last_backward, share, run.ddp.overlap_grad_reduce),
            *_overlapped(gather, first_forward, share, run.ddp.overlap_param_gather),
        ]
    )


def _overlapped(communication: Figure, computation: float, share: float, overlaps: bool) -> list[Figure]:
    """Returns the exposed part of communication that runs behind computation, and what it slows. `share`: the part that
    belongs to the unit without computation beside it."""
    if not overlaps:
        return [communication]
    alone = communication.times(share)
    exposed = max(alone.value, communication.value - computation)
    hidden = communication.value - exposed
    return [
        Figure(exposed, communication.source, communication.error),
        slowed_by(Figure(hidden, communication.source, communication.error)),
    ]
