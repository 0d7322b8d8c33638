"""Parts of columns are views of the projection, whose gradient is put together from theirs."""

import torch

from megatron.core.ops.split_columns import split_columns


def test_parts_are_views_and_gradients_come_together() -> None:
    packed = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    one, two, three = split_columns(packed, (3, 2, 1))
    assert torch.equal(two, packed[..., 3:5]) and three._base is not None
    (one.sum() + 2 * two.sum() + 3 * three.sum()).backward()
    expected = torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 3.0], dtype=torch.float64).expand_as(packed)
    assert packed.grad is not None and torch.equal(packed.grad, expected)
