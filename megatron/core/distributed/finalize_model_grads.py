"""Finishes the gradients of a step after all micro-batches: sums over model parallel ranks, and division by tokens.

Each rank works on its shards of the units. Ranks along a model parallel axis have equal unit plans, so their shards
have the same elements. The same holds for a tied weight on several stages, because it is a unit of its own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, all_reduce
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.fp8.recipes import DelayedScaling, finish_step
from megatron.core.parameters import ParameterInfo

_GROUP_OF_AXIS = {"tp": "tp", "etp": "expt_tp", "ep": "ep"}

GradientSlice = tuple[ParameterInfo, Tensor]
"""A parameter and the one-dimensional part of its gradient in this rank's shard."""


@torch.no_grad()
def finalize_model_grads(
    model: Sequence[torch.nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Finishes the data parallel sums, sums partial gradients over model parallel ranks, and divides by the number of
    tokens. Updates the expert biases of routers from the tokens of this global batch, and the scales of delayed fp8
    scaling from its largest values.

    With a loss per token, `num_tokens` is a scalar tensor with the number of tokens of this rank's micro-batches; it is
    zero on pipeline stages without the loss. Gradients are then sums over tokens, and this function makes them means
    over the global batch. A batch without tokens leaves them unchanged. Does not wait for the device.

    Raises UserError for a model chunk that is not wrapped in DistributedDataParallel.
    """
    chunks = [_data_parallel(chunk) for chunk in model]
    for chunk in chunks:
        chunk.start_grad_sync()
    for chunk in chunks:
        chunk.finish_grad_sync(force_all_reduce)
    groups = pg_collection or chunks[0].pg_collection
    slices = [
        (parameter_slice.info, parameter_slice.view_in(unit.gradient_shard))
        for chunk in chunks
        for unit in chunk.units
        for parameter_slice in unit.parameter_slices
    ]
    for axis, name in _GROUP_OF_AXIS.items():
        _sum_together([part for info, part in slices if axis in info.partial_gradient_axes], groups, name)
    _sum_tied(slices, groups)
    if num_tokens is not None:
        _divide_by_tokens(chunks, num_tokens, groups)
    finish_routers(chunks, groups)
    finish_delayed_scaling(chunks, groups)


def _sum_tied(slices: Sequence[GradientSlice], groups: ProcessGroupCollection) -> None:
    """Gives all copies of a tied weight the sum of their gradients: over the chunks of this rank, and over the stages
    that hold a copy."""
    copies: dict[tuple[str, str], list[Tensor]] = {}
    for info, part in slices:
        if info.tied:
            copies.setdefault((info.tied_over, info.name), []).append(part)
    for first, *others in copies.values():
        for other in others:
            first.add_(other)
    for group in sorted({group for group, _ in copies}):
        _sum_together([copies[key][0] for key in sorted(copies) if key[0] == group], groups, group)
    for first, *others in copies.values():
        for other in others:
            other.copy_(first)


def _sum_together(gradients: Sequence[Tensor], groups: ProcessGroupCollection, name: str) -> None:
    """Sums gradients over a group, with one all-reduce for each type. All its ranks pass the same list in the same
    order."""
    if not gradients or groups.size(name) == 1 or groups.rank(name) < 0:
        return
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    for alike in by_type.values():
        _sum_flat(alike, getattr(groups, name))


def _sum_flat(gradients: list[Tensor], group: Group) -> None:
    flat = all_reduce(torch.cat(gradients), group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total)


def _divide_by_tokens(
    chunks: Sequence[DistributedDataParallel], num_tokens: Tensor, groups: ProcessGroupCollection
) -> None:
    total = num_tokens.detach().clone().view(())
    for name in ("pp", "dp_cp"):
        if groups.size(name) > 1:
            all_reduce(total, getattr(groups, name))
    # In float64, so that the reciprocal is rounded only once, to the gradients' type.
    scale = 1.0 / total.clamp(min=1).double()
    for chunk in chunks:
        chunk.scale_gradients(scale)


def _data_parallel(chunk: torch.nn.Module) -> DistributedDataParallel:
    if not isinstance(chunk, DistributedDataParallel):
        raise UserError(
            f"{type(chunk).__name__} is not wrapped in DistributedDataParallel, which keeps the gradients to finalise"
        )
    return chunk


def finish_routers(chunks: Iterable[nn.Module], groups: ProcessGroupCollection) -> None:
    """Updates the expert biases of all routers of a rank's model chunks, with one all-reduce, and resets the routers'
    statistics of this global batch.

    A router is a module with `move_expert_bias` and `local_tokens_per_expert`. Each rank of a router's copies
    (`tp_dp_cp`) counts its own tokens. Counts are whole numbers in float64, so their sums are exact.
    """
    routers: list[Any] = [
        module for chunk in chunks for module in chunk.modules() if hasattr(module, "move_expert_bias")
    ]
    for router in routers:
        router.reset_global_aux_loss_tracker()
    biased = [router for router in routers if router.expert_bias is not None]
    if not biased:
        return
    counts = torch.stack([router.take_tokens_per_expert() for router in biased])  # [routers, experts]
    if groups.size("tp_dp_cp") > 1:
        all_reduce(counts, groups.tp_dp_cp)
    for router, count in zip(biased, counts, strict=True):
        router.move_expert_bias(count)


def finish_delayed_scaling(chunks: Iterable[nn.Module], groups: ProcessGroupCollection) -> None:
    """Adds the largest values of this global batch to the histories of all linear layers with delayed fp8 scaling, with
    one all-reduce over the ranks that have a copy or a part of them."""
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, DelayedScaling)]
    if layers:
        finish_step(layers, groups.tp_dp_cp if groups.size("tp_dp_cp") > 1 else None)
