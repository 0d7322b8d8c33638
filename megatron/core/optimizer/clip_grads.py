"""Norms and zeros of gradients and weights over the whole model, each element counted once, without a wait.

The result is the same to the bit on every rank: it decides by what weights are scaled that several ranks hold. A rank
without any unit, all of whose pipeline stages are empty, adds nothing and takes part: it names one of its chunks.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce, broadcast
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.sharding_strategy import GRIDS, Sharding, is_counted_on_this_rank
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.torch_private import foreach_norm

_MODEL_PARALLEL_GROUP = {"dense": "mp", "expert": "tp_ep_pp"}


def _gradients(unit: Unit) -> Tensor:
    return unit.gradient_shard


def _weights(unit: Unit) -> Tensor:
    return unit.weight_shard


def counted_gradients(
    units: Sequence[Unit], groups: ProcessGroupCollection, grid: str, owned: Callable[[Unit], Tensor] = _gradients
) -> Iterator[Tensor]:
    """Gradients of one grid that this rank adds to a sum over the model: what it owns, no copies, no padding.
    One-dimensional. With another `owned` tensor of a unit: what lies in that."""
    tied: set[str] = set()
    for unit in units:
        if unit.plan.grid == grid:
            for parameter_slice in unit.parameter_slices:
                if is_counted_on_this_rank(parameter_slice.info, groups) and parameter_slice.info.name not in tied:
                    yield parameter_slice.view_in(owned(unit))
                if parameter_slice.info.tied:  # two chunks of this rank may hold a copy each
                    tied.add(parameter_slice.info.name)


def grad_norm(
    units: Sequence[Unit], groups: ProcessGroupCollection, chunk: DistributedDataParallel | None = None
) -> Tensor:
    """2-norm of the whole model's gradient: a float64 scalar tensor, not finite where any gradient is not.

    Norms of single parameters are computed in the gradients' type; their squares are summed in float64.
    """

    def of_grid(gradients: list[Tensor]) -> Tensor:
        return torch.stack(foreach_norm(gradients)).double().square().sum()

    return _sum_over_model(units, groups, of_grid, chunk).sqrt()


def weight_norm(
    units: Sequence[Unit], groups: ProcessGroupCollection, chunk: DistributedDataParallel | None = None
) -> Tensor:
    """2-norm of the whole model's weights, as it computes with them: a float64 scalar tensor."""

    def of_grid(weights: list[Tensor]) -> Tensor:
        dtype = torch.promote_types(weights[0].dtype, torch.float32)
        return torch.stack([norm.double() for norm in foreach_norm(weights, 2, dtype)]).square().sum()

    return _sum_over_model(units, groups, of_grid, chunk, _weights).sqrt()


def count_zeros(
    units: Sequence[Unit], groups: ProcessGroupCollection, chunk: DistributedDataParallel | None = None
) -> Tensor:
    """How many elements of the whole model's gradient are exactly zero: a float64 scalar tensor."""

    def of_grid(gradients: list[Tensor]) -> Tensor:
        return torch.stack([gradient.numel() - gradient.count_nonzero() for gradient in gradients]).sum().double()

    return _sum_over_model(units, groups, of_grid, chunk)


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are divided by so that their norm is at most `max_norm`; 1 where it is already, or with 0."""
    if max_norm <= 0.0:
        return torch.ones_like(norm)
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def _sum_over_model(
    units: Sequence[Unit],
    groups: ProcessGroupCollection,
    of_grid: Callable[[list[Tensor]], Tensor],
    chunk: DistributedDataParallel | None,
    owned: Callable[[Unit], Tensor] = _gradients,
) -> Tensor:
    home = units[0] if units else chunk
    assert home is not None, "a rank without units has to name a chunk"
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
    names: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[str, str | None]] = {}
    for grid in GRIDS:
        # Every rank goes through both grids: another stage may have experts where this one has none.
        model, replicas = _groups_of_model(home.shardings[grid], grid)
        tensors = list(counted_gradients(units, groups, grid, owned))
        part = of_grid(tensors) if tensors else torch.zeros((), dtype=torch.float64, device=home.device)
        key = groups.ranks(model), groups.ranks(replicas) if replicas else ()
        parts[key] = parts[key] + part if key in parts else part
        names[key] = model, replicas
    return torch.stack([_sum_over_ranks(part, groups, *names[key]) for key, part in parts.items()]).sum()


def _groups_of_model(sharding: Sharding, grid: str) -> tuple[str, str | None]:
    """Names of the group of the ranks that hold one model between them, and of that of its replicas, if any."""
    if sharding.shards == 1:
        return _MODEL_PARALLEL_GROUP[grid], sharding.data_group
    return "intra_dist_opt", sharding.replica_group if sharding.instances > 1 else None


def _sum_over_ranks(part: Tensor, groups: ProcessGroupCollection, model: str, replicas: str | None) -> Tensor:
    if groups.size(model) > 1:
        all_reduce(part, getattr(groups, model))
        # Replicas add the same numbers up in groups of their own, where a ring may run another way.
        if replicas and groups.size(replicas) > 1:
            broadcast(part, getattr(groups, replicas))
    return part
