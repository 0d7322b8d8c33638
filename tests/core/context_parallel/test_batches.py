"""Megatron-LM's functions that cut batches: packed rows, and refusals. tests/facades/test_utils.py has whole rows."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.utils import (
    get_batch_on_this_cp_rank,
    get_batch_on_this_hybrid_cp_rank,
    get_thd_batch_on_this_cp_rank,
)


def test_a_packed_row_of_one_rank() -> None:
    batch = {"tokens": torch.arange(6)[None]}
    found, packed = get_thd_batch_on_this_cp_rank(batch, torch.tensor([[0, 2, 6]]), None, torch.tensor([4]), cp_size=1)
    assert found is batch and packed.qkv_format == "thd" and packed.max_seqlen_q == packed.max_seqlen_kv == 4
    assert packed.cu_seqlens_q.tolist() == [0, 2, 6]


def test_what_is_not_here_is_refused() -> None:
    bounds = torch.tensor([0, 2])
    with pytest.raises(UserError, match="get_batch_on_this_cp_rank cuts whole rows"):
        get_thd_batch_on_this_cp_rank({}, bounds, None, torch.tensor(2), cp_size=2)
    with pytest.raises(UserError, match="give None for cu_seqlens_padded"):
        get_thd_batch_on_this_cp_rank({}, bounds, bounds, torch.tensor(2), cp_size=1)
    with pytest.raises(UserError, match="--hybrid-context-parallel"):
        get_batch_on_this_hybrid_cp_rank({}, 2)


def test_one_rank_keeps_the_batch() -> None:
    batch = {"tokens": torch.zeros(1, 3), "attention_mask": None}
    assert get_batch_on_this_cp_rank(batch) is batch
