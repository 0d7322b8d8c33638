"""Writes that a skipped step leaves out."""

import torch

from megatron.core.optimizer.segments import replace


def test_replace_writes_in_place_unless_skipped() -> None:
    old, new = torch.zeros(2), torch.tensor([1.0, float("nan")])
    replace(torch.tensor(True), (old, new))
    assert old.tolist() == [0.0, 0.0]
    replace(torch.tensor(False), (old, torch.ones(2)))
    assert old.tolist() == [1.0, 1.0]
