"""Buckets of distances against transformers' rule, and the bias against a lookup for every pair."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from megatron.core.ops.relative_position import relative_position_bias, relative_position_buckets


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (6, 50)])
def test_buckets_are_those_of_transformers(bidirectional: bool, buckets: int, distance: int) -> None:
    distances = torch.arange(-300, 300).view(3, -1)
    expected = T5Attention._relative_position_bucket(distances, bidirectional, buckets, distance)
    assert torch.equal(relative_position_buckets(distances, bidirectional, buckets, distance), expected)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("queries", "keys", "first"), [(5, 5, 0), (1, 7, 6), (3, 7, 4)])
def test_bias_is_a_lookup_for_every_pair(bidirectional: bool, queries: int, keys: int, first: int) -> None:
    table = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    made = relative_position_bias(table, queries, keys, bidirectional=bidirectional, max_distance=5, first_query=first)
    distance = torch.arange(keys) - (torch.arange(queries) + first)[:, None]
    expected = table[relative_position_buckets(distance, bidirectional, 8, 5)].permute(2, 0, 1)[None]
    assert torch.equal(made, expected)
    upstream = torch.randn_like(made)
    gradients = [torch.autograd.grad(bias, table, upstream)[0] for bias in (made, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_gradients_in_half_precision_are_added_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(8, 2, generator=generator, dtype=torch.float64).requires_grad_()
    half = exact.detach().bfloat16().requires_grad_()
    upstream = torch.randn(1, 2, 300, 300, generator=generator).bfloat16()
    for table in (exact, half):
        bias = relative_position_bias(table, 300, 300, bidirectional=True, max_distance=20)
        assert bias.dtype is table.dtype
        bias.backward(upstream.to(table.dtype))
    assert exact.grad is not None and half.grad is not None
    assert (half.grad - exact.grad).abs().max() < 2**-8 * exact.grad.abs().max()
