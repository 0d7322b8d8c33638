"""Functions for batches that scripts of releases 0.17 to 0.19 read themselves."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks

from megatron.core import utils
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.facades import parallel_state, training
from megatron.facades.batches import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_tp_rank,
    update_seqlen_stats_from_cu_seqlens,
)


def batch(**more: Any) -> dict[str, Any]:
    ids = torch.arange(8).view(2, 4)
    return {"tokens": ids, "labels": ids + 1, "loss_mask": ids.float(), "position_ids": ids % 4, **more}


def on_tp_rank(given: Any, rank: int, group: Any, **more: Any) -> dict[str, Any]:
    settings = {"has_cu_seqlens": True, "is_hybrid_cp": False, "create_attention_mask_in_dataloader": False}
    settings |= {"broadcast_src_rank": 0, "broadcast_group": group, "cp_size": 1, "tp_rank": rank}
    settings |= {"micro_batch_size": 2, "seq_length": 4, "mtp_on_this_rank": False}
    return get_batch_on_this_tp_rank(given, **settings | more)


def test_they_have_their_public_homes() -> None:
    assert utils.get_batch_on_this_tp_rank is get_batch_on_this_tp_rank
    assert utils.flatten_batch_for_packed_sequences is flatten_batch_for_packed_sequences
    assert training.update_seqlen_stats_from_cu_seqlens is update_seqlen_stats_from_cu_seqlens


@pytest.mark.parametrize(
    ("bounds", "joined"),
    [
        ([[0, 2, 4], [0, 3, 4]], [0, 2, 4, 7, 8]),
        ([[0, 2, 4, -1], [0, 1, 3, 4]], [0, 2, 4, 5, 7, 8]),
        ([[0, 2, 4, 4], [0, 1, 3, 4]], [0, 2, 4, 5, 7, 8]),
    ],
)
def test_packed_rows_become_one_row(bounds: list[list[int]], joined: list[int]) -> None:
    """The numbers are those that release 0.19.2 returns for these batches."""
    packed = batch(cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_seqlen=torch.tensor([2, 3]))
    flat = flatten_batch_for_packed_sequences(packed | {"attention_mask": None})
    assert flat["tokens"].tolist() == [list(range(8))] and flat["position_ids"].tolist() == [[0, 1, 2, 3] * 2]
    assert flat["cu_seqlens"].tolist() == [joined] and flat["cu_seqlens"].dtype == torch.int32
    assert flat["max_seqlen"].tolist() == [3] and flat["attention_mask"] is None
    assert flatten_batch_for_packed_sequences(batch()).keys() == batch().keys()


def of_ranks() -> tuple[dict[str, Any], str]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group, rank = groups_or_default(None).tp, dist.get_rank()
    given = batch(cu_seqlens=torch.tensor([[0, 2, 4]]), max_seqlen=2) if rank == 0 else None
    found = on_tp_rank(given, rank, group)
    with pytest.raises(UserError) as refused:
        on_tp_rank(given, rank, group, broadcast_src_rank=1)
    return found, str(refused.value)


def test_all_tensor_parallel_ranks_get_the_batch_of_the_first() -> None:
    for found, refused in run_on_ranks(of_ranks, 2):
        assert all(torch.equal(found[name], value) for name, value in batch().items())
        assert found["cu_seqlens"].tolist() == [[0, 2, 4]] and found["max_seqlen"].tolist() == [2]
        assert found["attention_mask"] is None and "give 0" in refused


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="--hybrid-context-parallel"):
        on_tp_rank(batch(), 0, None, is_hybrid_cp=True)
    with pytest.raises(UserError, match="has no batch"):
        on_tp_rank(None, 0, None)
    assert set(on_tp_rank(batch(), 0, None, has_cu_seqlens=False)) == {*batch(), "attention_mask"}
