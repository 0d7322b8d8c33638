"""The smooth bound against its formula; half types are rounded once."""

import pytest
import torch

from megatron.core.ops.attention import soft_cap as module
from megatron.core.ops.attention.soft_cap import soft_cap


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("at_once", [1 << 25, 20])
def test_values_and_gradients(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NUMBERS_AT_ONCE", at_once)
    x, dy = values(7, 2, 4).requires_grad_(), values(7, 2, 4, seed=1)
    result, expected = soft_cap(x, 3.0), 3.0 * torch.tanh(x / 3.0)
    assert torch.allclose(result, expected, rtol=1e-14)
    found, wanted = (torch.autograd.grad(y, x, dy)[0] for y in (result, expected))
    assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-14)


def test_half_types_are_rounded_once() -> None:
    x = values(50, 40).bfloat16()
    expected = 3.0 * torch.tanh(x.double() / 3.0)
    result = soft_cap(x, 3.0)
    assert result.dtype is torch.bfloat16
    assert ((result.double() - expected).abs() <= expected.abs() * 2**-8).all()
