"""Norms and zero counts of the whole model's gradients or weights. Each element counts once; nothing waits for the
device.

The results are equal to the bit on every rank, which is necessary because they scale the updates of weights that
several ranks hold. A rank whose pipeline stages are all empty has no unit. It takes part in the sums with zero, and
passes one of its chunks.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.communication.collectives import all_reduce, broadcast
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.sharding_strategy import GRIDS, Sharding, is_counted_on_this_rank
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer.exact_norm import exact_norm
from megatron.core.utils.torch_private import foreach_norm

_MODEL_PARALLEL_GROUP = {"dense": "mp", "expert": "tp_ep_pp"}


def _gradients(unit: Unit) -> Tensor:
    return unit.gradient_shard


def counted_gradients(
    units: Sequence[Unit], groups: ProcessGroupCollection, grid: str, shard_of: Callable[[Unit], Tensor] = _gradients
) -> Iterator[Tensor]:
    """Yields the gradients of one grid that this rank adds to a sum over the model: its shards, without copies that
    another rank counts and without padding, as one-dimensional views. `shard_of` selects another shard of a unit, such
    as its weights."""
    tied: set[str] = set()
    for unit in units:
        if unit.plan.grid == grid:
            for parameter_slice in unit.parameter_slices:
                if is_counted_on_this_rank(parameter_slice.info, groups) and parameter_slice.info.name not in tied:
                    yield parameter_slice.view_in(shard_of(unit))
                if parameter_slice.info.tied:  # two chunks of this rank may hold a copy each
                    tied.add(parameter_slice.info.name)


def grad_norm(
    units: Sequence[Unit], groups: ProcessGroupCollection, chunk: DistributedDataParallel | None = None
) -> Tensor:
    """Returns the 2-norm of the whole model's gradient: a float64 scalar tensor, not finite if any gradient is not.

    Norms of single parameters are computed in the gradients' type, float32 at least; their squares are summed in
    float64. With exact gradient sums the norm is exact too.
    """
    if chunk is not None and chunk.ddp_config.exact_gradient_sums:  # a model without experts, split over no ranks
        model, _ = _groups_of_model(chunk.shardings["dense"], "dense")
        group = getattr(groups, model) if groups.size(model) > 1 else None
        return exact_norm(counted_gradients(units, groups, "dense"), group, chunk.device)

    def of_grid(gradients: list[Tensor]) -> Tensor:
        if gradients[0].dtype.itemsize >= 4:
            return torch.stack(foreach_norm(gradients)).double().square().sum()
        return torch.stack(foreach_norm(gradients, 2, torch.float32)).double().square().sum()

    return _sum_over_model(units, groups, of_grid, chunk).sqrt()


def weight_norm(
    units: Sequence[Unit], groups: ProcessGroupCollection, chunk: DistributedDataParallel | None = None
) -> Tensor:
    """Returns the 2-norm of the whole model's weights in the model's type: a float64 scalar tensor."""

    def of_grid(weights: list[Tensor]) -> Tensor:
        dtype = torch.promote_types(weights[0].dtype, torch.float32)
        return torch.stack([norm.double() for norm in foreach_norm(weights, 2, dtype)]).square().sum()

    return _sum_over_model(units, groups, of_grid, chunk, Unit.model_shard).sqrt()


def count_zeros(
    units: Sequence[Unit], groups: ProcessGroupCollection, chunk: DistributedDataParallel | None = None
) -> Tensor:
    """Returns how many elements of the whole model's gradient are exactly zero: a float64 scalar tensor."""

    def of_grid(gradients: list[Tensor]) -> Tensor:
        return torch.stack([gradient.numel() - gradient.count_nonzero() for gradient in gradients]).sum().double()

    return _sum_over_model(units, groups, of_grid, chunk)


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the divisor of gradients that limits their norm to `max_norm`: 1 if it is smaller already, or if
    `max_norm` is 0."""
    if max_norm <= 0.0:
        return torch.ones_like(norm)
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def _sum_over_model(
    units: Sequence[Unit],
    groups: ProcessGroupCollection,
    of_grid: Callable[[list[Tensor]], Tensor],
    chunk: DistributedDataParallel | None,
    shard_of: Callable[[Unit], Tensor] = _gradients,
) -> Tensor:
    home = units[0] if units else chunk
    assert home is not None, "a rank without units must pass a chunk"
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
    names: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[str, str | None]] = {}
    for grid in GRIDS:
        # Every rank handles both grids: another stage may have experts if this one has none.
        model, replicas = _groups_of_model(home.shardings[grid], grid)
        tensors = list(counted_gradients(units, groups, grid, shard_of))
        part = of_grid(tensors) if tensors else torch.zeros((), dtype=torch.float64, device=home.device)
        key = groups.ranks(model), groups.ranks(replicas) if replicas else ()
        parts[key] = parts[key] + part if key in parts else part
        names[key] = model, replicas
    return torch.stack([_sum_over_ranks(part, groups, *names[key]) for key, part in parts.items()]).sum()


def _groups_of_model(sharding: Sharding, grid: str) -> tuple[str, str | None]:
    """Returns the names of two groups: the ranks that together hold one model, and its replicas (None without)."""
    if sharding.shards == 1:
        return _MODEL_PARALLEL_GROUP[grid], sharding.data_group
    return "intra_dist_opt", sharding.replica_group if sharding.instances > 1 else None


def _sum_over_ranks(part: Tensor, groups: ProcessGroupCollection, model: str, replicas: str | None) -> Tensor:
    if groups.size(model) > 1:
        all_reduce(part, getattr(groups, model))
        # Each replica sums the same numbers in its own group, possibly in another order.
        if replicas and groups.size(replicas) > 1:
            broadcast(part, getattr(groups, replicas))
    return part
