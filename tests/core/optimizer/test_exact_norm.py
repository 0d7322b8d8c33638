"""The norm of the gradient, in any parts."""

import pytest
import torch
from torch import Tensor

from megatron.core.optimizer import exact_norm as module
from megatron.core.optimizer.exact_norm import exact_norm

CPU = torch.device("cpu")


def norm(*parts: Tensor) -> Tensor:
    return exact_norm(parts, None, CPU)


def test_parts_and_order_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(20_000, generator=generator) * torch.randn(20_000, generator=generator).mul(8).exp()
    whole, exact = norm(gradient), gradient.double().norm()
    assert abs(whole / exact - 1.0) < 1e-14
    assert torch.equal(whole, norm(*gradient.split(777)))
    assert torch.equal(whole, norm(gradient[torch.randperm(20_000, generator=generator)]))
    monkeypatch.setattr(module, "_AT_ONCE", 501)
    assert torch.equal(whole, norm(gradient))
    in_float = [torch.stack([part.norm() for part in gradient.split(size)]).norm() for size in (20_000, 777)]
    assert not torch.equal(*in_float), "norms of float32 depend on the parts"


def test_zeros_extremes_and_what_is_not_finite() -> None:
    assert norm() == 0.0 and norm(torch.zeros(3), torch.zeros(0)) == 0.0
    for size in (1e-30, 1.0, 1e30):
        assert norm(torch.tensor([3.0 * size]), torch.tensor([4.0 * size])) == pytest.approx(5.0 * size, rel=1e-6)
    for value in ("nan", "inf"):
        assert not norm(torch.tensor([1.0, float(value)]), torch.ones(2)).isfinite()
