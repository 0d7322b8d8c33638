"""Parts of columns are views of the projection, whose gradient is put together from theirs."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.ops.split_columns import new_gradient_of, split_columns
from megatron.core.utils.autograd_context import AutogradContext


class Doubled(torch.autograd.Function):
    """Doubles a tensor. Backward writes its result where the gradient belongs, as kernels do."""

    @staticmethod
    def forward(ctx: AutogradContext, inputs: Tensor) -> Tensor:
        ctx.new_gradient = new_gradient_of(inputs)
        return inputs * 2

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> Tensor:
        return torch.mul(gradient, 2, out=ctx.new_gradient())  # type: ignore[no-any-return]


class Copies(TorchDispatchMode):
    """Counts the elements that are copied."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.copy_.default:
            self.count += args[1].numel()
        return func(*args, **(kwargs or {}))


@pytest.fixture
def copies() -> Iterator[Copies]:
    with Copies() as counted:
        yield counted


def packed_tensor() -> Tensor:
    return torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)


def test_parts_are_views_and_gradients_come_together() -> None:
    packed = packed_tensor()
    one, two, three = split_columns(packed, (3, 2, 1))
    assert torch.equal(two, packed[..., 3:5]) and three._base is not None
    (one.sum() + 2 * two.sum() + 3 * three.sum()).backward()
    expected = torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 3.0], dtype=torch.float64).expand_as(packed)
    assert packed.grad is not None and torch.equal(packed.grad, expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_written_in_place_is_not_copied(copies: Copies, groups: int) -> None:
    packed = packed_tensor()[:, :, :groups].detach().requires_grad_()
    one, two, three = split_columns(torch.mul(packed, 1.0).contiguous(), (3, 2, 1))
    weights = torch.arange(1.0, 5.0, dtype=torch.float64)
    parts = Doubled.apply(one), Doubled.apply(two.unflatten(-1, (2, 1))).flatten(3) * weights[1:3], three * weights[3]
    torch.cat(parts, -1).sum().backward()
    expected = torch.tensor([2.0, 2.0, 2.0, 4.0, 6.0, 4.0], dtype=torch.float64).expand_as(packed)
    assert packed.grad is not None and torch.equal(packed.grad, expected)
    assert copies.count == three.numel()


def test_a_part_that_is_used_twice_or_never() -> None:
    packed = packed_tensor()
    one, two, _ = split_columns(packed, (3, 2, 1))
    (Doubled.apply(one).sum() + 3 * Doubled.apply(one).sum() + Doubled.apply(two).sum() + two.sum()).backward()
    expected = torch.tensor([8.0, 8.0, 8.0, 3.0, 3.0, 0.0], dtype=torch.float64).expand_as(packed)
    assert packed.grad is not None and torch.equal(packed.grad, expected)


def test_each_backward_has_memory_of_its_own() -> None:
    packed = packed_tensor()
    one, two = split_columns(packed, (4, 2))
    total = Doubled.apply(one).sum() + Doubled.apply(two).sum()
    (of_part,) = torch.autograd.grad(total, one, retain_graph=True)  # ends before the packed gradient is complete
    (first,) = torch.autograd.grad(total, packed, retain_graph=True)
    (second,) = torch.autograd.grad(3 * total, packed)
    assert torch.equal(of_part, torch.full_like(one, 2.0))
    assert torch.equal(first, torch.full_like(packed, 2.0)) and torch.equal(second, torch.full_like(packed, 6.0))


@pytest.mark.parametrize("turn", [lambda packed: packed.transpose(0, 1), lambda packed: packed[:1].expand(2, 3, 2, 6)])
def test_a_projection_that_is_not_contiguous(turn) -> None:  # type: ignore[no-untyped-def]
    packed = packed_tensor()
    one, two = split_columns(turn(packed), (4, 2))
    (Doubled.apply(one).sum() + two.sum()).backward()
    plain = packed_tensor()
    one, two = turn(plain).split([4, 2], -1)
    (2 * one.sum() + two.sum()).backward()
    assert packed.grad is not None and plain.grad is not None and torch.equal(packed.grad, plain.grad)


def test_a_part_with_strided_rows_has_a_contiguous_gradient() -> None:
    packed = packed_tensor()
    one, two = split_columns(packed, (4, 2))
    turned = one.transpose(2, 3)
    assert new_gradient_of(turned)().is_contiguous() and new_gradient_of(two)().stride() == two.stride()
