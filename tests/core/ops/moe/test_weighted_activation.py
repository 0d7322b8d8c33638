"""Activation times the router's weight, and the type in which the product is computed."""

import torch
import torch.nn.functional as F

from megatron.core.ops.activation import Activation
from megatron.core.ops.moe.weighted_activation import weighted, weighted_activation


def test_activation_times_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    product, bias = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((5, 8), (8,)))
    weights = torch.rand(5, dtype=torch.float64, generator=generator)
    gate, up = (product + bias).chunk(2, -1)
    activation = Activation(F.silu, gated=True)
    expected = F.silu(gate) * up
    assert torch.allclose(weighted_activation(product, bias, None, activation), expected, rtol=1e-14)
    assert torch.allclose(weighted_activation(product, bias, weights, activation), expected * weights[:, None])


def test_the_product_is_computed_in_the_wider_type_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, weights = torch.randn(64, 8, generator=generator).bfloat16(), torch.rand(64, generator=generator)
    found = weighted(rows, weights)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, (rows.float() * weights[:, None]).bfloat16())
    assert not torch.equal(found, rows * weights.bfloat16()[:, None])
