"""The linear layer in fp8, on one process."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.distributed.main_grad import attach_main_grad
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.linear import Fp8Linear
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit
from megatron.core.parameters import InputsToGather

RECIPES = ("tensorwise", "delayed", "blockwise")


class MainGrad:
    defers_weight_grad = False

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.zeros_like(weight, dtype=torch.float32)
        self.uses = 0

    def add_product(self, gradient: Tensor, inputs: Tensor) -> None:
        self.total += gradient.float().t() @ inputs.float()

    def add_grouped_product(
        self, gradient: Tensor, inputs: Tensor | InputsToGather, accumulate: Callable[..., Any]
    ) -> None:
        accumulate(self.total, gradient, inputs)


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, w, b, dy = (torch.randn(*shape, generator=generator) for shape in ((9, 2, 160), (320, 160), (320,), (9, 2, 320)))
    return x.to(dtype).requires_grad_(), nn.Parameter((w / 12).to(dtype)), b.to(dtype).requires_grad_(), dy.to(dtype)


def layer_for(weight: Tensor, recipe: str, name: str = "hybrid", wgrad: bool = True) -> Fp8Linear:
    return Fp8Linear(Fp8Settings(recipe, FORMATS[name], wgrad=wgrad), LinearSplit(), weight)


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize(("recipe", "name"), itertools.product(RECIPES, FORMATS))
@pytest.mark.parametrize("wgrad", [True, False])
def test_values_and_gradients(recipe: str, name: str, wgrad: bool) -> None:
    x, w, b, dy = operands()
    layer = layer_for(w, recipe, name, wgrad)
    y = layer(x, w, b)
    y.backward(dy)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, w, b)]
    expected = F.linear(*exact)
    expected.backward(dy.double())
    gradient = 0.05 if name == "e4m3" else 0.07  # about half a unit in the last place of e4m3, and of e5m2
    assert y.shape == expected.shape and 0.01 < relative(y, expected) < 0.04
    assert 0.01 < relative(x.grad, exact[0].grad) < gradient
    assert relative(w.grad, exact[1].grad) < (gradient if wgrad else 0.01)
    torch.testing.assert_close(b.grad, dy.sum((0, 1)))


@pytest.mark.parametrize("wgrad", [True, False])
def test_the_weight_gradient_goes_to_the_main_gradient_in_float32(wgrad: bool) -> None:
    x, w, _, dy = operands()
    layer = layer_for(w, "tensorwise", wgrad=wgrad)
    layer(x, w).backward(dy)
    expected, w.grad = w.grad, None
    w.main_grad_accumulator = MainGrad(w)
    for _ in range(2):
        layer(x, w).backward(dy)
    assert w.grad is None
    assert relative(w.main_grad_accumulator.total, 2 * expected) < 0.004  # bfloat16 of the ordinary gradient


@pytest.mark.parametrize(("recipe", "wgrad"), [*((recipe, True) for recipe in RECIPES), ("tensorwise", False)])
def test_the_weight_gradient_is_multiplied_by_the_main_gradients_factor(recipe: str, wgrad: bool) -> None:
    x, w, _, dy = operands()
    totals = [torch.zeros_like(w, dtype=torch.float32) for _ in range(2)]
    for factor, total in zip((1.0, 0.25), totals, strict=True):
        attach_main_grad(w, total, lambda parameter: None, factor=factor)
        layer_for(w, recipe, wgrad=wgrad)(x, w).backward(dy)
    assert totals[0].any() and torch.equal(totals[1], 0.25 * totals[0])


def test_a_weight_is_quantised_once_until_it_changes() -> None:
    x, w, _, _ = operands()
    layer = layer_for(w, "tensorwise")
    first, transposed = layer.weight_rows(w), layer.weight_columns(w)
    layer(x, w)
    assert layer.weight_rows(w) is first and layer.weight_columns(w) is transposed
    with torch.no_grad():
        w.mul_(2)
    second = layer.weight_rows(w)
    assert second is not first
    w.data.mul_(2)  # as an optimizer does through its own view: nothing tells torch
    layer.forget_weights()
    assert layer.weight_rows(w) is not second
    layer.adapt_to_data_parallel(gradient_share=1.0, shards_weights=True)
    layer.forget_weights()
    assert layer.weight_rows(w) is not layer.weight_rows(w)


def test_without_gradients_nothing_is_transposed_or_recorded() -> None:
    x, w, _, _ = operands()
    layer = layer_for(w, "delayed")
    with torch.no_grad():
        layer(x, w)
    assert layer.scaling.take_seen()[0] == 0.0  # type: ignore[operator]
