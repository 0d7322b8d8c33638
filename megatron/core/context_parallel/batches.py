"""Megatron-LM's functions that cut a batch for context parallel ranks."""

from typing import Any

from torch import Tensor

from megatron.core.context_parallel.splitting import cut_rows, sequence_part
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.packed_seq_params import PackedSeqParams

_NOT_ROWS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "sample_ids")


def get_batch_on_this_cp_rank(batch: dict[str, Any], cp_group: object = None) -> dict[str, object]:
    """Cuts a batch, tensors [b, s, ...] of whole rows, to this context parallel rank's part of the sequences, in place.

    The rows are cut in zig-zag order into 2 * ranks chunks. `attention_mask` [.., .., s, s] keeps the rows of this
    rank's queries; document boundaries stay those of whole rows. Raises UserError if the rows cannot be divided.
    """
    groups = groups_or_default(None)
    part = sequence_part(groups if cp_group is None else ProcessGroupCollection(cp=cp_group))
    if part is None:
        return batch
    for name, value in batch.items():
        if isinstance(value, Tensor) and name not in _NOT_ROWS:
            batch[name] = cut_rows(value, part, 2 if name == "attention_mask" else 1)
    return batch


def get_thd_batch_on_this_cp_rank(
    batch: dict[str, Any],
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    max_seqlen: Tensor,
    cp_size: int | None = None,
    cp_rank: int | None = None,
) -> tuple[dict[str, object], PackedSeqParams]:
    """Returns the batch of one packed row and the record of its documents, whose boundaries `cu_seqlens` is [1, n + 1]
    or [n + 1], and `max_seqlen` the longest. Raises UserError with context parallel ranks, and for padded documents."""
    size = groups_or_default(None).size("cp") if cp_size is None else cp_size
    if size > 1:
        raise UserError(
            "get_thd_batch_on_this_cp_rank: not yet: packed documents cut one by one for context parallel ranks; "
            "get_batch_on_this_cp_rank cuts whole rows, in which --reset-attention-mask keeps documents apart"
        )
    if cu_seqlens_padded is not None:
        raise UserError("get_thd_batch_on_this_cp_rank: not yet: padded documents; give None for cu_seqlens_padded")
    bounds = cu_seqlens.reshape(-1)
    longest = int(max_seqlen.reshape(-1)[0].item()) if isinstance(max_seqlen, Tensor) else int(max_seqlen)
    return batch, PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def get_batch_on_this_hybrid_cp_rank(batch: dict[str, Any], local_cp_size: int, cp_group: object = None) -> object:
    """Raises UserError: samples are not cut over context parallel groups of their own."""
    raise UserError(
        "get_batch_on_this_hybrid_cp_rank: not yet: --hybrid-context-parallel; leave it out, and "
        "get_batch_on_this_cp_rank cuts every row over all context parallel ranks"
    )
