"""The linear layer against torch's, and how it hands its weight gradient to a main gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.ops.linear import linear


class MainGrad:
    """Keeps what it is given, as a runner does that computes weight gradients later."""

    def __init__(self) -> None:
        self.products: list[tuple[Tensor, Tensor]] = []

    def add_product(self, output_gradient: Tensor, inputs: Tensor) -> None:
        self.products.append((output_gradient, inputs))


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 5)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_gradients(shape: tuple[int, ...], with_bias: bool) -> None:
    x, w, b = values(*shape), values(6, 5, seed=1), values(6, seed=2) if with_bias else None
    assert torch.equal(linear(x, w, b), F.linear(x, w, b))
    inputs = [x, w] if b is None else [x, w, b]
    assert torch.autograd.gradcheck(linear, inputs)


def test_linear_feeds_the_main_gradient_and_leaves_no_gradient() -> None:
    x, w, b = values(3, 4, 5), nn.Parameter(values(6, 5, seed=1).detach()), values(6, seed=2)
    w.main_grad_accumulator = MainGrad()
    dy = values(3, 4, 6, seed=3).detach()
    linear(x, w, b).backward(dy)
    assert w.grad is None and torch.allclose(b.grad, dy.sum((0, 1)))
    ((rows, columns),) = w.main_grad_accumulator.products
    assert rows.shape == (12, 6) and columns.shape == (12, 5)
    assert not rows.requires_grad and not columns.requires_grad  # keeping them keeps no graph alive
    expected = torch.autograd.grad(F.linear(x, w), [x, w], dy)
    assert torch.allclose(x.grad, expected[0]) and torch.allclose(rows.T @ columns, expected[1])


def test_linear_reads_its_weight_at_backward() -> None:
    # Under full sharding the storage is given up after forward and filled again before backward.
    x, w = values(3, 5), nn.Parameter(values(6, 5, seed=1).detach())
    expected = torch.autograd.grad(F.linear(x, w).sum(), x)[0]
    kept = w.detach().clone()
    y = linear(x, w)
    w.untyped_storage().resize_(0)
    w.untyped_storage().resize_(kept.untyped_storage().nbytes())
    w.data.copy_(kept)
    y.sum().backward()
    assert torch.allclose(x.grad, expected)


def test_half_on_a_cpu_is_float32_rounded() -> None:
    x, w = values(4, 600).half(), values(3, 600, seed=1).half()
    assert torch.equal(linear(x, w), (x.float() @ w.float().T).half())


@pytest.mark.parametrize(("given", "asked"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
def test_outputs_in_another_type_are_rounded_once(given: str, asked: str) -> None:
    x, w, b = (
        tensor.detach().to(getattr(torch, given)).requires_grad_()
        for tensor in (values(9, 64), values(6, 64, seed=1), values(6, seed=2))
    )
    y = linear(x, w, b, out_dtype=getattr(torch, asked))
    exact = F.linear(x.double(), w.double(), b.double())
    assert y.dtype is getattr(torch, asked)
    torch.testing.assert_close(y.double(), exact, rtol=2 * torch.finfo(y.dtype).eps, atol=1e-5)
    dy = values(9, 6, seed=3).detach().to(y.dtype)
    y.backward(dy)
    plain = linear(x, w, b)
    expected = torch.autograd.grad(plain, [x, w, b], dy.to(x.dtype))
    assert all(torch.equal(one, other) for one, other in zip((x.grad, w.grad, b.grad), expected, strict=True))


def test_a_weight_can_be_left_out_of_training() -> None:
    x, w = values(3, 5), nn.Parameter(values(6, 5, seed=1).detach())
    w.main_grad_accumulator = MainGrad()
    linear(x, w, trains_weight=False).sum().backward()
    assert not w.main_grad_accumulator.products and w.grad is None
    assert torch.equal(x.grad, torch.autograd.grad(linear(x, w).sum(), x)[0])
