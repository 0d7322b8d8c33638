"""Micro-batches without values have the fields that a run's batches have."""

import torch
from support.command_lines import configured

from megatron.diagnosis.memory.micro_batches import ShapeOnlyData
from megatron.training.data.batch import collate_gpt


def test_a_batch_has_the_shapes_and_types_of_collated_samples() -> None:
    ones = torch.ones(128, dtype=torch.int64)
    item = {"tokens": ones, "labels": ones, "position_ids": ones, "loss_mask": ones.float()}
    item["sample_id"] = torch.tensor(0)
    real, found = collate_gpt([item, item]), next(ShapeOnlyData(configured()))
    for name in ("tokens", "labels", "position_ids", "loss_mask", "sample_ids"):
        mine, theirs = getattr(found, name), getattr(real, name)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
        assert mine.is_meta == (name != "sample_ids")
    assert found.cu_seqlens is None is real.cu_seqlens


def test_packed_rows_have_boundaries() -> None:
    found = next(ShapeOnlyData(configured("--reset-position-ids --reset-attention-mask --micro-batch-size 4")))
    assert found.cu_seqlens.shape == (5,) and found.max_seqlen == 128  # four rows of one document each
