"""Norms against their formulas, and that half types are computed in float32."""

import pytest
import torch
from torch import Tensor

from megatron.core.ops.norm import layer_norm, rms_norm


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain(x: Tensor, w: Tensor, b: Tensor | None, zero_centered: bool) -> Tensor:
    w = 1 + w if zero_centered else w
    if b is None:
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w + b


def ours(x: Tensor, w: Tensor, b: Tensor | None, zero_centered: bool) -> Tensor:
    return rms_norm(x, w, 1e-3, zero_centered) if b is None else layer_norm(x, w, b, 1e-3, zero_centered)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_values_and_gradients(rms: bool, zero_centered: bool) -> None:
    x, w, b = values(3, 4, 6), values(6, seed=1), None if rms else values(6, seed=2)
    inputs = [t for t in (x, w, b) if t is not None]
    assert torch.allclose(ours(x, w, b, zero_centered), plain(x, w, b, zero_centered), rtol=1e-13, atol=1e-13)
    dy = values(3, 4, 6, seed=3).detach()
    expected = torch.autograd.grad(plain(x, w, b, zero_centered), inputs, dy)
    for a, e in zip(torch.autograd.grad(ours(x, w, b, zero_centered), inputs, dy), expected, strict=True):
        assert torch.allclose(a, e, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rms", [False, True])
def test_without_weights(rms: bool) -> None:
    x, one = values(3, 4, 6), torch.ones(6, dtype=torch.float64)
    result = rms_norm(x, None, 1e-3) if rms else layer_norm(x, None, None, 1e-3)
    expected = plain(x, one, None if rms else 0 * one, False)
    dy = values(3, 4, 6, seed=3).detach()
    assert torch.allclose(result, expected, rtol=1e-13, atol=1e-13)
    found, wanted = (torch.autograd.grad(y, x, dy)[0] for y in (result, expected))
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-13)
    half = x.detach().bfloat16()
    result = rms_norm(half, None, 1e-3) if rms else layer_norm(half, None, None, 1e-3)
    expected = plain(half.double(), one, None if rms else 0 * one, False)
    assert result.dtype is torch.bfloat16
    assert ((result.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32])
def test_half_types_are_rounded_once(rms: bool, zero_centered: bool, stream: torch.dtype) -> None:
    # A bfloat16 weight of a zero-centred norm holds digits that 1 + weight would lose.
    x, w = values(8, 512).detach().to(stream), (values(512, seed=1).detach() * 1e-3).bfloat16()
    b = None if rms else values(512, seed=2).detach().bfloat16()
    result = ours(x, w, b, zero_centered)
    expected = plain(x.double(), w.double(), None if b is None else b.double(), zero_centered)
    assert result.dtype is torch.bfloat16
    assert ((result.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()
