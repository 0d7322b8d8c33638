"""Megatron-LM's functions for batches that scripts of releases 0.17 to 0.19 read themselves."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.utils.rendezvous import local_device
from megatron.core.utils.warn import warn_on_first_rank
from megatron.facades.utils import BATCH_FIELDS, tensors_of_first_rank

_PACKING = ("cu_seqlens", "max_seqlen")
_OF_ROWS = ("tokens", "labels", "loss_mask", "position_ids")


def get_batch_on_this_tp_rank(
    batch: Mapping[str, object] | None,
    has_cu_seqlens: bool,
    is_hybrid_cp: bool,
    create_attention_mask_in_dataloader: bool,
    broadcast_src_rank: int,
    broadcast_group: dist.ProcessGroup | None,
    cp_size: int,
    tp_rank: int,
    micro_batch_size: int,
    seq_length: int,
    mtp_on_this_rank: bool,
    pipeline_model_parallel_size: int = 1,
    is_pipeline_first_stage: bool = False,
    is_pipeline_last_stage: bool = False,
) -> dict[str, Any]:
    """Returns the micro-batch of the first tensor parallel rank on this rank's device: tokens, labels, loss_mask,
    attention_mask and position_ids, with `has_cu_seqlens` also cu_seqlens and max_seqlen; None for what it lacks.

    `batch` is read on the rank with `tp_rank` 0 only. Sizes and fields travel with the tensors, so that every pipeline
    stage gets all fields and the arguments about sizes and stages have no effect. `broadcast_src_rank` must be the
    first rank of `broadcast_group`. Raises UserError with `is_hybrid_cp`, and if the first rank has no batch.
    """
    if is_hybrid_cp:
        raise UserError("get_batch_on_this_tp_rank: not yet: --hybrid-context-parallel; leave it out")
    if batch is None and tp_rank == 0:
        raise UserError("get_batch_on_this_tp_rank: the first tensor parallel rank has no batch")
    names = (*BATCH_FIELDS, *(_PACKING if has_cu_seqlens else ()))
    found = {name: _tensor(batch, name) for name in names}
    device = local_device()
    if broadcast_group is None or dist.get_world_size(broadcast_group) == 1:
        return {name: None if value is None else value.to(device, non_blocking=True) for name, value in found.items()}
    if dist.get_global_rank(broadcast_group, 0) != broadcast_src_rank:
        raise UserError(
            f"get_batch_on_this_tp_rank: broadcast_src_rank {broadcast_src_rank} is not the first rank of the group; "
            f"give {dist.get_global_rank(broadcast_group, 0)}"
        )
    return dict(tensors_of_first_rank(found, None, device, broadcast_group)[0])


def _tensor(batch: Mapping[str, Any] | None, name: str) -> Tensor | None:
    value = None if batch is None or name not in batch else batch[name]
    return torch.tensor([value]) if isinstance(value, int) else value


def flatten_batch_for_packed_sequences(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch of packed rows as one row: tensors [b, s] become [1, b * s].

    `cu_seqlens` [b, n], the document boundaries of each row, padded at its end with its last value or -1, becomes the
    boundaries [1, m] of the whole row, each once. `max_seqlen` [b] becomes that of all rows, [1]. A batch without
    `cu_seqlens` is returned as it is.
    """
    bounds = batch.get("cu_seqlens")
    if bounds is None:
        return batch
    flat = dict(batch)
    for name in _OF_ROWS:
        if flat.get(name) is not None:
            flat[name] = flat[name].reshape(1, -1)
    rows = bounds.reshape(-1, bounds.shape[-1])
    length = batch["tokens"].shape[-1]
    starts = torch.arange(rows.shape[0], device=rows.device, dtype=rows.dtype)[:, None] * length
    joined = torch.where(rows >= 0, rows + starts, -1).unique()
    flat["cu_seqlens"] = joined[joined >= 0][None]
    if flat.get("max_seqlen") is not None:
        flat["max_seqlen"] = torch.as_tensor(flat["max_seqlen"]).max().reshape(1)
    return flat


def update_seqlen_stats_from_cu_seqlens(cu_seqlens: Tensor | None) -> None:
    """Has no effect, which a line says once: the throughput in the log counts attention over whole samples, as without
    this call."""
    warn_on_first_rank(
        "update_seqlen_stats_from_cu_seqlens has no effect: the throughput counts attention over whole samples"
    )
