"""Megatron-LM's small functions for user scripts. Those that communicate use the default process groups, which are
those of the current run."""

import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, all_reduce, broadcast, group_rank
from megatron.core.context_parallel.batches import get_batch_on_this_cp_rank as get_batch_on_this_cp_rank
from megatron.core.distributed import DistributedDataParallel
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.optimizer.clip_grads import weight_norm
from megatron.core.parameters import info_of
from megatron.core.transformer.layer_inputs import plain_causal_mask
from megatron.core.transformer.module import Float16Module
from megatron.core.utils.rendezvous import local_device
from megatron.facades import parallel_state
from megatron.training.data.sources import get_blend_and_blend_per_split as get_blend_and_blend_per_split
from megatron.training.log.memory import memory_report

# ---------------------------------------------------------------------------------------------------------------------
# Printing


def print_rank_0(message: object, rank: int | None = None) -> None:
    """Prints on the first rank. `rank` is this process's rank, for use before torch.distributed is initialized."""
    if (rank if rank is not None else _rank()) == 0:
        print(message, flush=True)


def is_last_rank() -> bool:
    """Whether this is the last rank of the world, which computes the losses unless the pipeline is V-shaped."""
    return _rank() == (dist.get_world_size() - 1 if dist.is_initialized() else 0)


def print_rank_last(message: object) -> None:
    """Prints on the last rank."""
    if is_last_rank():
        print(message, flush=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def warn_rank_0(message: object, rank: int | None = None) -> None:
    """Warns on the first rank. `rank` is this process's rank, for use before torch.distributed is initialized."""
    if (rank if rank is not None else _rank()) == 0:
        warnings.warn(str(message), stacklevel=2)


# ---------------------------------------------------------------------------------------------------------------------
# Models


def unwrap_model(model: object, module_instances: type | tuple[type, ...] | None = None) -> Any:
    """Returns the module inside wrappers of the given classes (default: data parallel and half precision). A list gives
    a list."""
    wrappers: Any = module_instances or (DistributedDataParallel, Float16Module)
    if isinstance(model, list):
        return [unwrap_model(chunk, wrappers) for chunk in model]
    while isinstance(model, wrappers):
        model = model.module
    return model


def calc_params_l2_norm(model: nn.Module | Sequence[nn.Module], force_create_fp32_copy: bool = False) -> float:
    """Returns the 2-norm of all weights of the model, each counted once over all ranks. Waits for the device.

    The norm is computed in float32 at least, without a copy; `force_create_fp32_copy` has no effect.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    if len(wrapped) == len(chunks):
        units = [unit for chunk in wrapped for unit in chunk.units]
        return weight_norm(units, wrapped[0].pg_collection, wrapped[0]).item()
    weights = [p.detach().view(-1)[: info_of(p).box.numel] for chunk in chunks for p in chunk.parameters()]
    return torch.stack([weight.double().square().sum() for weight in weights]).sum().sqrt().item()


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    pad_token: int | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    pad_mask_loss: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for token ids [b, s] of a left-to-right model, the attention mask (bool [1 or b, 1, s, s], True where
    masked), the loss mask (float32 [b, s]) and the position ids (int64 [b, s]).

    A document ends with its `eod_token`. The mask has one row for all samples unless documents are kept apart.
    Scripts of older releases, which know neither `pad_token` nor `pad_mask_loss`, give their five arguments by position
    or by name.
    """
    if isinstance(pad_token, bool):  # the older form by position
        eod_mask_loss, reset_attention_mask = reset_attention_mask, reset_position_ids
        reset_position_ids, pad_token = pad_token, None
    if pad_mask_loss and pad_token is None:
        raise UserError("get_ltor_masks_and_position_ids(pad_mask_loss=True): give it the pad_token")
    rows, length = data.shape
    ended = (data == eod_token).long().cumsum(dim=1)
    document = torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], dim=1)  # [b, s], from 0 in each row
    mask = torch.ones(length, length, dtype=torch.bool, device=data.device).triu(diagonal=1)[None, None]
    if reset_attention_mask:
        mask = mask | (document[:, None, :, None] != document[:, None, None, :])
    loss_mask = torch.ones(rows, length, dtype=torch.float32, device=data.device)
    if eod_mask_loss:
        loss_mask[data == eod_token] = 0.0
    if pad_mask_loss:
        loss_mask[data == pad_token] = 0.0
    positions = torch.arange(length, device=data.device).expand(rows, length)
    if reset_position_ids:
        starts = torch.where(document != document.roll(1, dims=1), positions, 0)
        starts[:, 0] = 0
        positions = positions - starts.cummax(dim=1).values
    return mask, loss_mask, positions.clone()


BATCH_FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_PACKING = ("cu_seqlens", "max_seqlen", "local_cp_size")


def get_batch_on_this_tp_rank(
    data_iterator: Iterator[Mapping[str, object]] | None, mtp_on_this_rank: bool | None = None
) -> dict[str, Tensor | None]:
    """Returns the next micro-batch on this rank's device: tokens, labels, loss_mask, attention_mask, position_ids.

    All tensor parallel ranks get the batch that the first of them reads; the iterators of the others advance too, if
    they have any. `attention_mask` is None if the data has none (causal attention); document boundaries
    (--reset-attention-mask) become a mask. Every rank gets all fields, with or without layers of multi-token
    prediction. If a script passes `mtp_on_this_rank`, as those of release 0.16 do, the result also has the keys
    cu_seqlens, max_seqlen and local_cp_size, which are None. Raises UserError if the first tensor parallel rank has no
    iterator.
    """
    groups = groups_or_default(None)
    batch = None if data_iterator is None else next(data_iterator)
    found = dict.fromkeys(BATCH_FIELDS) if batch is None else _fields(batch)
    if batch is None and groups.rank("tp") == 0:
        raise UserError("get_batch_on_this_tp_rank: the first tensor parallel rank has no data_iterator to read from")
    device, plain = local_device(), _shape_if_plain_causal(found["attention_mask"])
    if plain is not None:
        found["attention_mask"] = None  # every rank makes it
    if groups.size("tp") > 1:
        found, plain = tensors_of_first_rank(found, plain, device, groups.tp)
    else:
        found = {name: None if value is None else value.to(device, non_blocking=True) for name, value in found.items()}
    if plain is not None:
        found["attention_mask"] = plain_causal_mask(plain, device)
    return found if mtp_on_this_rank is None else {**found, **dict.fromkeys(_PACKING)}


def _fields(batch: Mapping[str, object]) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {name: _field(batch, name) for name in BATCH_FIELDS}
    cu_seqlens = _field(batch, "cu_seqlens")
    if found["attention_mask"] is None and cu_seqlens is not None:
        assert found["tokens"] is not None
        found["attention_mask"] = _mask_of_documents(cu_seqlens, found["tokens"])
    return found


_TYPES = (torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool)
_MOST_DIMS = 4


def _shape_if_plain_causal(mask: Tensor | None) -> Sequence[int] | None:
    """Returns the shape of a mask on the host, [b, 1, s, s], that hides later tokens and nothing else; otherwise
    None."""
    if mask is None or mask.device.type != "cpu" or mask.dtype != torch.bool or mask.dim() != _MOST_DIMS:
        return None
    if mask.size(1) != 1 or mask.size(2) != mask.size(3):
        return None
    return mask.shape if torch.equal(mask, _later(mask.size(3)).expand_as(mask)) else None


@functools.lru_cache(maxsize=1)
def _later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)


def tensors_of_first_rank(
    found: dict[str, Tensor | None], plain: Sequence[int] | None, device: torch.device, group: Group
) -> tuple[dict[str, Tensor | None], Sequence[int] | None]:
    """Returns the tensors of the first rank of a group, and the shape of its plain causal mask, on all its ranks. Types
    and shapes are sent first, from host to host, so that no rank waits for the device."""
    header = torch.zeros(len(found) + 1, 2 + _MOST_DIMS, dtype=torch.int64)  # type, number of dims, sizes
    if group_rank(group) == 0:
        if plain is not None:
            header[-1] = torch.tensor([1, len(plain), *plain])
        for row, value in zip(header[:-1], found.values(), strict=True):
            if value is not None:
                row[0], row[1] = 1 + _TYPES.index(value.dtype), value.dim()
                row[2 : 2 + value.dim()] = torch.tensor(value.shape)
    result: dict[str, Tensor | None] = {}
    *rows, (has_plain, _, *shape) = broadcast(header, group).tolist()
    for (name, value), (kind, dims, *sizes) in zip(found.items(), rows, strict=True):
        if kind == 0:
            result[name] = None
        elif group_rank(group) == 0:
            assert value is not None
            result[name] = broadcast(value.to(device, non_blocking=True).contiguous(), group)
        else:
            result[name] = broadcast(torch.empty(sizes[:dims], dtype=_TYPES[kind - 1], device=device), group)
    return result, shape if has_plain else None


def _field(batch: Mapping[str, Any], name: str) -> Tensor | None:
    try:
        return batch[name]
    except KeyError:
        return None


def _mask_of_documents(cu_seqlens: Tensor, tokens: Tensor) -> Tensor:
    """Returns a mask, bool [b, 1, s, s], True where masked, from document boundaries over the rows end to end."""
    place = torch.arange(tokens.numel(), device=cu_seqlens.device)
    document = torch.bucketize(place, cu_seqlens[1:], right=True).view(tokens.shape)
    later = torch.ones(tokens.size(1), tokens.size(1), dtype=torch.bool, device=cu_seqlens.device).triu(diagonal=1)
    return later | (document[:, None, :, None] != document[:, None, None, :])


def is_first_or_last_pipeline_stage(vp_stage: int | None) -> bool:
    """Returns whether this pipeline rank has the embedding or the loss; with `vp_stage`, whether that chunk does."""
    whole = vp_stage is None
    return parallel_state.is_pipeline_first_stage(whole, vp_stage) or parallel_state.is_pipeline_last_stage(
        whole, vp_stage
    )


def report_memory(name: str) -> None:
    """Prints the CUDA memory of this process in MiB, on the ranks that hold the first replica of the model. Prints
    nothing without CUDA."""
    if not torch.cuda.is_available() or groups_or_default(None).rank("dp") != 0:
        return
    report = memory_report(torch.device("cuda", torch.cuda.current_device()))
    parts = {
        "allocated": report.device_allocated,
        "max allocated": report.device_peak_allocated,
        "reserved": report.device_reserved,
        "max reserved": report.device_peak_reserved,
    }
    values = " | ".join(f"{part}: {(value or 0) / 2**20:.1f}" for part, value in parts.items())
    print(f"[rank {_rank()}] {name} memory (MiB) | {values}", flush=True)


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Returns the means of scalars over the data parallel ranks: [number of losses]."""
    mean = torch.stack([loss.detach().reshape(()) for loss in losses])
    groups = groups_or_default(None)
    if groups.size("dp") == 1:
        return mean
    return all_reduce(mean, groups.dp) / groups.size("dp")


def reduce_max_stat_across_model_parallel_group(stat: float | None) -> float | None:
    """Returns the largest value over the tensor and pipeline parallel ranks, without those that pass None. None if
    every rank passes None."""
    value = torch.tensor([-math.inf if stat is None else float(stat)], dtype=torch.float64, device=local_device())
    found = all_reduce(value, groups_or_default(None).mp, dist.ReduceOp.MAX).item()
    return None if found == -math.inf else found


def logical_and_across_model_parallel_group(input: bool) -> bool:
    """Returns whether the condition holds on all tensor and pipeline parallel ranks."""
    value = torch.tensor([int(input)], device=local_device())
    return bool(all_reduce(value, groups_or_default(None).mp, dist.ReduceOp.MIN).item())
