"""What gradients still need when all micro-batches of a step are done, read off the parameters' descriptors.

Every rank works on what it owns of each unit. Ranks along a model parallel axis plan their units alike, and so do the
stages that hold a tied weight, which is a unit of its own: their ranges are the same elements.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.collectives import Group, all_reduce
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.expert_balance import finish_routers
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.exceptions import UserError
from megatron.core.parameters import ParameterInfo
from megatron.core.process_groups_config import ProcessGroupCollection

_GROUP_OF_AXIS = {"tp": "tp", "etp": "expt_tp", "ep": "ep"}

Owned = tuple[ParameterInfo, Tensor]
"""A parameter and what this rank owns of its gradient, one-dimensional."""


@torch.no_grad()
def finalize_model_grads(
    model: Sequence[torch.nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Finish the data parallel sums, sum what model parallel ranks hold in parts, and divide by the count of tokens.
    What routers have counted in this global batch moves the biases of their experts.

    `num_tokens`, a scalar tensor, is given with a loss per token: the number of tokens of this rank's micro-batches,
    zero on pipeline stages other than the one that has the loss. Gradients are then sums over tokens and become means
    over the global batch; a batch without tokens leaves them as they are. Nothing here waits for the device.
    """
    chunks = [_data_parallel(chunk) for chunk in model]
    for chunk in chunks:
        chunk.start_grad_sync()
    for chunk in chunks:
        chunk.finish_grad_sync(force_all_reduce)
    groups = pg_collection or chunks[0].pg_collection
    owned = [
        (parameter_slice.info, parameter_slice.of(unit.owned_gradients))
        for unit in _units(chunks)
        for parameter_slice in unit.parameter_slices
    ]
    for axis, name in _GROUP_OF_AXIS.items():
        _sum_together([part for info, part in owned if axis in info.partial_gradient_axes], groups, name)
    _sum_tied(owned, groups)
    if num_tokens is not None:
        _divide_by_tokens(chunks, num_tokens, groups)
    finish_routers(chunks, groups)


def _units(chunks: Sequence[DistributedDataParallel]) -> list[Unit]:
    return [unit for chunk in chunks for unit in chunk.units]


def _sum_tied(owned: Sequence[Owned], groups: ProcessGroupCollection) -> None:
    """Give all copies of a tied weight the sum of their gradients: of those on this rank (in several chunks), and over
    the stages that hold one."""
    copies: dict[tuple[str, str], list[Tensor]] = {}
    for info, part in owned:
        if info.tied:
            copies.setdefault((info.tied_over, info.name), []).append(part)
    for first, *others in copies.values():
        for other in others:
            first.add_(other)
    for group in ("embd", "pos_embd"):
        _sum_together([copies[key][0] for key in sorted(copies) if key[0] == group], groups, group)
    for first, *others in copies.values():
        for other in others:
            other.copy_(first)


def _sum_together(gradients: Sequence[Tensor], groups: ProcessGroupCollection, name: str) -> None:
    """Sum gradients over a group, all of whose ranks give the same ones in one order: those of a type in one go."""
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
    # In float64, where it costs nothing: the reciprocal is rounded once, in the gradients' type.
    scale = 1.0 / total.clamp(min=1).double()
    for chunk in chunks:
        chunk.scale_gradients(scale)


def _data_parallel(chunk: torch.nn.Module) -> DistributedDataParallel:
    if not isinstance(chunk, DistributedDataParallel):
        raise UserError(
            f"{type(chunk).__name__} is not wrapped in DistributedDataParallel, which keeps the gradients to finalise"
        )
    return chunk
