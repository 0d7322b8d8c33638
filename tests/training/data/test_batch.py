"""megatron/training/data/batch.py: items become a micro-batch, and their documents one list of boundaries."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.training.data.batch import Batch, CollatedDataset, collate_gpt


def test_items_are_stacked(build_dataset):
    dataset = build_dataset(40, create_attention_mask=True)
    items = [dataset[i] for i in (3, 9, 11)]
    batch = collate_gpt(items)
    for name in ("tokens", "labels", "loss_mask", "position_ids", "attention_mask"):
        assert torch.equal(batch[name], torch.stack([item[name] for item in items]))
    assert batch.tokens.shape == (3, 16)
    assert batch.attention_mask.shape == (3, 1, 16, 16)
    assert batch.sample_ids.tolist() == [3, 9, 11]
    assert batch.cu_seqlens is None
    assert batch.max_seqlen is None


def test_boundaries_of_rows_laid_end_to_end(build_dataset):
    dataset = build_dataset(40, reset_attention_mask=True)
    batch = collate_gpt([dataset[i] for i in range(6)])
    text = batch.tokens.flatten()
    ends = {i + 1 for i in range(96) if text[i] == 0 or i % 16 == 15}
    assert batch.cu_seqlens.tolist() == sorted({0} | ends)
    assert len(ends) > 8
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == batch.cu_seqlens.diff().max()
    assert batch.attention_mask is None


def test_a_copy_elsewhere_leaves_sample_ids_here(build_dataset):
    dataset = build_dataset(10, reset_attention_mask=True)
    batch = collate_gpt([dataset[0], dataset[1]])
    moved = batch.to("meta")
    assert moved.tokens.device.type == moved.cu_seqlens.device.type == "meta"
    assert moved.sample_ids.tolist() == [0, 1]
    assert moved.max_seqlen == batch.max_seqlen
    assert batch.tokens.device.type == "cpu"


def test_items_of_a_users_dataset_need_no_ids():
    item = {name: torch.zeros(4) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    batch = collate_gpt([item, item])
    assert isinstance(batch, Batch)
    assert batch.sample_ids is None
    with pytest.raises(KeyError, match="weights"):
        batch["weights"]


def test_a_row_that_fills_up_a_batch_of_a_users_dataset_has_no_loss():
    item = {"tokens": torch.arange(3), "loss_mask": torch.ones(3)}
    dataset = CollatedDataset([item], list)
    assert len(dataset) == 1 and dataset[0] is item
    assert torch.equal(dataset[None]["tokens"], item["tokens"]) and not dataset[None]["loss_mask"].any()
    with pytest.raises(UserError, match="needs items with a tensor loss_mask; give a number of batches instead"):
        CollatedDataset([torch.ones(1)], list)[None]
