"""What gradients still need when all micro-batches of a step are done, read off the parameters' descriptors."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.core.collectives import Group, all_reduce, broadcast
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.units import Slot, Unit
from megatron.core.exceptions import UserError
from megatron.core.process_groups_config import ProcessGroupCollection

_GROUP_OF_AXIS = {"tp": "tp", "cp": "cp", "pp": "pp", "etp": "expt_tp", "ep": "ep"}


@torch.no_grad()
def finalize_model_grads(
    model: Sequence[torch.nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Finish the data parallel sums, sum what model parallel ranks hold in parts, and divide by the count of tokens.

    `num_tokens`, a scalar tensor, is given with a loss per token: the number of tokens of this rank's micro-batches
    (known on the last pipeline stage). Gradients are then sums over tokens and become means over the global batch; a
    batch without tokens leaves them as they are. Nothing here waits for the device.
    """
    chunks = [_data_parallel(chunk) for chunk in model]
    for chunk in chunks:
        chunk.finish_grad_sync(force_all_reduce)
    groups = pg_collection or chunks[0].pg_collection
    units = [unit for chunk in chunks for unit in chunk.units]
    for axis, name in _GROUP_OF_AXIS.items():
        partial = (slot for slot in _all_slots(units) if axis in slot[1].info.partial_gradient_axes)
        _sum_together(partial, groups, name)
    _sum_together((slot for slot in _all_slots(units) if slot[1].info.tied), groups, "embd")
    if num_tokens is not None:
        _divide_by_tokens(chunks, num_tokens, groups)


def _all_slots(units: Iterable[Unit]) -> Iterable[tuple[Unit, Slot]]:
    return ((unit, slot) for unit in units for slot in unit.slots)


def _sum_together(slots: Iterable[tuple[Unit, Slot]], groups: ProcessGroupCollection, name: str) -> None:
    """Sum gradients over a group, those of one type in one collective; canonical order makes it the same everywhere."""
    if groups.size(name) == 1 or groups.rank(name) < 0:
        return
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for unit, slot in slots:
        by_type.setdefault(unit.grad_buffer.dtype, []).append(slot.of(unit.grad_buffer))
    for gradients in by_type.values():
        _sum_flat(gradients, getattr(groups, name))


def _sum_flat(gradients: list[Tensor], group: Group) -> None:
    flat = all_reduce(torch.cat(gradients), group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total)


def _divide_by_tokens(
    chunks: Sequence[DistributedDataParallel], num_tokens: Tensor, groups: ProcessGroupCollection
) -> None:
    total = num_tokens.detach().clone().view(())
    if groups.size("pp") > 1:
        broadcast(total, groups.pp, source=groups.size("pp") - 1)
    if groups.size("dp_cp") > 1:
        all_reduce(total, groups.dp_cp)
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
