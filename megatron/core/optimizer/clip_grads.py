"""Norms and zeros of gradients and weights over the whole model, each parameter counted once, without a wait."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.distributed.replicas import counts_here
from megatron.core.distributed.units import Unit
from megatron.core.process_groups_config import ProcessGroupCollection

_MODEL_PARALLEL_GROUP = {"dense": "mp", "expert": "tp_ep_pp"}


def _gradients(unit: Unit) -> Tensor:
    return unit.grad_buffer


def _weights(unit: Unit) -> Tensor:
    return unit.param_buffer


def counted_gradients(
    units: Sequence[Unit], groups: ProcessGroupCollection, grid: str, buffer: Callable[[Unit], Tensor] = _gradients
) -> Iterator[Tensor]:
    """Gradients of one grid that this rank adds to a sum over the model: no copies, no padding. One-dimensional.

    With another `buffer` of a unit: what lies in that.
    """
    for unit in units:
        if unit.plan.grid == grid:
            for slot in unit.slots:
                if counts_here(slot.info, groups):
                    yield slot.of(buffer(unit))


def grad_norm(units: Sequence[Unit], groups: ProcessGroupCollection) -> Tensor:
    """2-norm of the whole model's gradient: a float64 scalar tensor, not finite where any gradient is not.

    Norms of single parameters are computed in the gradients' type; their squares are summed in float64.
    """

    def of_grid(gradients: list[Tensor]) -> Tensor:
        return torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).square().sum()

    return _sum_over_model(units, groups, of_grid).sqrt()


def weight_norm(units: Sequence[Unit], groups: ProcessGroupCollection) -> Tensor:
    """2-norm of the whole model's weights, as it computes with them: a float64 scalar tensor."""

    def of_grid(weights: list[Tensor]) -> Tensor:
        dtype = torch.promote_types(weights[0].dtype, torch.float32)
        return torch.stack([norm.double() for norm in torch._foreach_norm(weights, 2, dtype)]).square().sum()

    return _sum_over_model(units, groups, of_grid, _weights).sqrt()


def count_zeros(units: Sequence[Unit], groups: ProcessGroupCollection) -> Tensor:
    """How many elements of the whole model's gradient are exactly zero: a float64 scalar tensor."""

    def of_grid(gradients: list[Tensor]) -> Tensor:
        return torch.stack([gradient.numel() - gradient.count_nonzero() for gradient in gradients]).sum().double()

    return _sum_over_model(units, groups, of_grid)


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are divided by so that their norm is at most `max_norm`; 1 where it is already, or with 0."""
    if max_norm <= 0.0:
        return torch.ones_like(norm)
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def _sum_over_model(
    units: Sequence[Unit],
    groups: ProcessGroupCollection,
    of_grid: Callable[[list[Tensor]], Tensor],
    buffer: Callable[[Unit], Tensor] = _gradients,
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=units[0].grad_buffer.device)
    for grid, name in _MODEL_PARALLEL_GROUP.items():
        if not any(unit.plan.grid == grid for unit in units) and groups.size(name) == 1:
            continue
        tensors = list(counted_gradients(units, groups, grid, buffer))
        part = of_grid(tensors) if tensors else torch.zeros_like(total)
        if groups.size(name) > 1:
            all_reduce(part, getattr(groups, name))
        total = total + part
    return total
