"""Queries, keys and values are views of the projection, whose gradient is put together from theirs."""

import torch

from megatron.core.ops.rope import apply_rope, rotation_of_angles
from megatron.core.ops.split_heads import split_heads, split_rotated_heads


def test_parts_are_views_and_gradients_come_together() -> None:
    packed = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    query, gate, key, value = split_heads(packed, (3, 0, 1, 1))
    assert query.shape == (2, 3, 2, 3, 4) and gate.shape[3] == 0 and value.shape == key.shape == (2, 3, 2, 1, 4)
    assert torch.equal(key[..., 0, :], packed[..., 3, :]) and value._base is not None
    (query.sum() + 2 * key.sum() + 3 * value.sum()).backward()
    expected = torch.tensor([1.0, 1.0, 1.0, 2.0, 3.0], dtype=torch.float64)[:, None].expand_as(packed)
    assert packed.grad is not None and torch.equal(packed.grad, expected)


def test_rotated_parts_are_those_of_the_two_operations() -> None:
    packed = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64)
    rotation = rotation_of_angles(torch.randn(2, 1, 1, 4, dtype=torch.float64), interleaved=False)
    query, gate, key, value = split_heads(packed, (3, 0, 1, 1))
    expected = apply_rope(query, rotation), gate, apply_rope(key, rotation), value
    assert all(map(torch.equal, split_rotated_heads(packed, (3, 0, 1, 1), rotation), expected))
