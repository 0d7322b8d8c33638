"""Activations against their formulas and torch's, and times the router's weight."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.activation import (
    Activation,
    choose_activation,
    gelu_erf,
    gelu_tanh,
    quick_gelu,
    squared_relu,
    weighted,
    weighted_activation,
)

X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (gelu_tanh, F.gelu(X, approximate="tanh")),
        (gelu_erf, F.gelu(X)),
        (quick_gelu, X * torch.sigmoid(1.702 * X)),
        (squared_relu, X.clamp(min=0) ** 2),
    ],
)
def test_functions(function, expected) -> None:
    assert torch.allclose(function(X), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 8, dtype=torch.float64)])
def test_a_gate_is_the_first_half(bias) -> None:
    gate, up = (X if bias is None else X + bias).chunk(2, -1)
    assert torch.allclose(Activation(F.silu, gated=True)(X, bias), F.silu(gate) * up, rtol=1e-14)


def test_clamp_and_offset_of_a_gate() -> None:
    gate, up = X.chunk(2, -1)
    found = choose_activation(F.silu, gated=True, clamp=1.0, up_offset=0.5)(X)
    assert torch.allclose(found, F.silu(gate.clamp(max=1.0)) * (up.clamp(-1.0, 1.0) + 0.5), rtol=1e-14)


def test_gelu_is_the_tanh_form_where_the_bias_is_fused() -> None:
    assert torch.allclose(choose_activation(F.gelu, bias_fused=True)(X), F.gelu(X, approximate="tanh"), rtol=1e-12)
    assert torch.allclose(choose_activation(F.gelu)(X), F.gelu(X), rtol=1e-12)
    assert (F.gelu(X) - F.gelu(X, approximate="tanh")).abs().max() > 1e-5


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
