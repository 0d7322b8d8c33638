"""Splitting of tensors and vocabularies, with one rank. `test_mappings` broadcasts batches."""

import pytest
import torch

from megatron.core import tensor_parallel as tp
from megatron.core.communication.collectives import PlannedGroup
from megatron.core.exceptions import UserError

X = torch.arange(12.0).view(3, 4)


def test_cutting() -> None:
    left, right = tp.split_tensor_along_last_dim(X, 2)
    assert torch.equal(torch.cat([left, right], -1), X) and left.data_ptr() == X.data_ptr()
    assert all(part.is_contiguous() for part in tp.split_tensor_along_last_dim(X, 2, contiguous_split_chunks=True))
    with pytest.raises(UserError, match="4 is not divisible by 3"):
        tp.split_tensor_along_last_dim(X, 3)
    assert torch.equal(tp.gather_split_1d_tensor(tp.split_tensor_into_1d_equal_chunks(X)), X.view(-1))
    assert tp.VocabUtility.vocab_range_from_global_vocab_size(128, 1, 4) == (32, 64)
    assert tp.VocabUtility.vocab_range_from_per_partition_vocab_size(32, 3, 4) == (96, 128)


def test_each_rank_takes_its_part_of_a_flat_tensor() -> None:
    parts = [tp.split_tensor_into_1d_equal_chunks(X, tp_group=PlannedGroup((4, 5, 6), rank)) for rank in range(3)]
    assert torch.equal(torch.cat(parts), X.view(-1)) and parts[1].data_ptr() == X.view(-1)[4:].data_ptr()
    copied = tp.split_tensor_into_1d_equal_chunks(X, new_buffer=True, tp_group=PlannedGroup((4, 5, 6), 1))
    assert torch.equal(copied, parts[1]) and copied.data_ptr() != parts[1].data_ptr()
