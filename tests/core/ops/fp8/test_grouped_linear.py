"""The grouped linear layer of experts in fp8, on one process."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed.main_grad import attach_main_grad
from megatron.core.exceptions import UserError
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.grouped_linear import Fp8GroupedLinear
from megatron.core.ops.fp8.micro_batches import MicroBatches
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit
from megatron.core.ops.moe.grouped_linear import RowGroups, grouped_linear

RECIPES = ("tensorwise", "delayed", "blockwise")
GROUPS = RowGroups.of_sources(torch.tensor([[5, 130], [0, 0], [140, 3]]).t())
ROWS = 278


class MainGrad:
    defers_weight_grad = False

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.zeros_like(weight, dtype=torch.float32)

    def add_grouped_product(self, gradient: Tensor, inputs: Tensor, accumulate) -> None:  # type: ignore[no-untyped-def]
        accumulate(self.total, gradient, inputs)


def operands() -> tuple[Tensor, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(*shape, generator=generator) for shape in ((ROWS, 48), (3, 80, 48), (ROWS, 80)))
    return x.bfloat16().requires_grad_(), nn.Parameter((w / 7).bfloat16()), dy.bfloat16()


def settings(recipe: str, name: str = "hybrid", wgrad: bool = True) -> Fp8Settings:
    return Fp8Settings(recipe, FORMATS[name], wgrad=wgrad)


def layer_for(weight: Tensor, recipe: str, name: str = "hybrid", wgrad: bool = True) -> Fp8GroupedLinear:
    return Fp8GroupedLinear(settings(recipe, name, wgrad), LinearSplit(), weight, MicroBatches((0, 1)))


def relative(ours: Tensor | None, exact: Tensor | None) -> float:
    assert ours is not None and exact is not None
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize(("recipe", "name", "wgrad"), [*itertools.product(RECIPES, FORMATS, [True, False])])
def test_values_and_gradients(recipe: str, name: str, wgrad: bool) -> None:
    x, w, dy = operands()
    y = layer_for(w, recipe, name, wgrad)(x, w, GROUPS)
    y.backward(dy)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, w)]
    expected = grouped_linear(exact[0], exact[1], GROUPS)
    expected.backward(dy.double())
    gradient = 0.05 if name == "e4m3" else 0.07  # about half a unit in the last place of e4m3, and of e5m2
    assert 0.01 < relative(y, expected) < 0.04
    assert 0.01 < relative(x.grad, exact[0].grad) < gradient
    assert relative(w.grad, exact[1].grad) < (gradient if wgrad else 0.01)
    assert w.grad is not None and not w.grad[1].any()


@pytest.mark.parametrize("wgrad", [True, False])
def test_the_weight_gradient_goes_to_the_main_gradient_in_float32(wgrad: bool) -> None:
    x, w, dy = operands()
    layer = layer_for(w, "tensorwise", wgrad=wgrad)
    layer(x, w, GROUPS).backward(dy)
    expected, w.grad = w.grad, None
    w.main_grad_accumulator = MainGrad(w)  # type: ignore[attr-defined]
    for _ in range(2):
        layer(x, w, GROUPS).backward(dy)
    assert w.grad is None and expected is not None
    assert relative(w.main_grad_accumulator.total, 2 * expected.double()) < 0.004  # type: ignore[attr-defined]


@pytest.mark.parametrize(("recipe", "wgrad"), [*((recipe, True) for recipe in RECIPES), ("tensorwise", False)])
def test_the_weight_gradient_is_multiplied_by_the_main_gradients_factor(recipe: str, wgrad: bool) -> None:
    x, w, dy = operands()
    totals = [torch.zeros_like(w, dtype=torch.float32) for _ in range(2)]
    for factor, total in zip((1.0, 0.25), totals, strict=True):
        attach_main_grad(w, total, lambda parameter: None, factor=factor)
        layer_for(w, recipe, wgrad=wgrad)(x, w, GROUPS).backward(dy)
    assert totals[0].any() and torch.equal(totals[1], 0.25 * totals[0])


def test_no_rows_have_no_gradient() -> None:
    _, w, _ = operands()
    x = torch.empty(0, 48, dtype=torch.bfloat16, requires_grad=True)
    for recipe in RECIPES:
        w.grad = None
        layer_for(w, recipe)(x, w, RowGroups.of_sources(torch.zeros(2, 3, dtype=torch.int64))).sum().backward()
        assert w.grad is not None and not w.grad.any()


def test_sizes_that_no_gpu_multiplies_are_refused() -> None:
    with pytest.raises(UserError, match=r"--fp8-format: a linear layer has a weight of \[24, 32\]"):
        layer_for(torch.empty(3, 24, 32), "tensorwise")
