"""Linear layers by Transformer Engine (a stand-in computes): gradients, main gradients, experts, fp8."""

import pytest
import torch
from support import fake_transformer_engine as fake
from torch import Tensor, nn

from megatron.core.distributed.main_grad import attach_main_grad
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.recipes import Fp8Settings
from megatron.core.ops.linear import linear
from megatron.core.ops.moe.grouped_linear import RowGroups, grouped_linear
from megatron.core.ops.transformer_engine.linear import make_grouped_linear, make_linear


def settings(recipe: str) -> Fp8Settings:
    return Fp8Settings(recipe, FORMATS["hybrid"])


def problem() -> tuple[Tensor, nn.Parameter, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows, weight, bias, dy = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 7, 16), (32, 16), (32,), (3, 7, 32))
    )
    return rows.requires_grad_(), nn.Parameter(weight), nn.Parameter(bias), dy


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
@pytest.mark.parametrize("main_grads", [False, True])
def test_gradients_of_two_micro_batches(recipe: str | None, main_grads: bool) -> None:
    rows, weight, bias, dy = problem()
    expected = torch.autograd.grad(linear(rows, weight, bias), [rows, weight, bias], dy)
    total, done, prepared = torch.zeros_like(weight), [], []
    if main_grads:
        attach_main_grad(weight, total, done.append, lambda: prepared.append(len(done)))
    layer = make_linear(fake.FAKE, settings(recipe) if recipe else None, weight)
    for _ in range(2):
        output = layer(rows, weight, bias)
        torch.testing.assert_close(output, linear(rows, weight, bias))
        output.backward(dy)
    torch.testing.assert_close(rows.grad, 2 * expected[0])
    torch.testing.assert_close(total if main_grads else weight.grad, 2 * expected[1])
    torch.testing.assert_close(bias.grad, 2 * expected[2])
    if main_grads:
        assert weight.grad is None and len(done) == 2 and prepared == [0, 1]


def test_the_scales_of_gradients_are_updated_in_each_backward() -> None:
    # The update belongs to the first product of a forward. One that only quantises a weight has no backward.
    rows, first, _, dy = problem()
    second = nn.Parameter(torch.eye(32, dtype=torch.float64))
    layers = [make_linear(fake.FAKE, settings("delayed"), weight) for weight in (first, second)]
    before = fake.backward_updates
    for number in range(3):  # the weights change between the last two
        if number == 2:
            for layer in layers:
                layer.forget_weights()
        with layers[0].around_forward():
            output = layers[1](layers[0](rows, first), second)
        output.backward(dy)
    assert fake.backward_updates == before + 3
    assert torch.equal(layers[1].products.module.kept["weight"], second) and not layers[0].products.module.kept


def test_parameters_that_move_or_thaw_between_forward_and_backward() -> None:
    rows, weight, _, dy = problem()
    expected = torch.autograd.grad(linear(rows, weight), weight, dy)[0]
    total = torch.zeros_like(weight)
    attach_main_grad(weight, total, lambda parameter: None)
    layer = make_linear(fake.FAKE, None, weight)
    outputs = []
    for _ in range(2):
        outputs.append(layer(rows, weight))
        weight.data = weight.data.clone()
    for output in outputs:
        output.backward(dy)
    torch.testing.assert_close(total, 2 * expected)
    weight.requires_grad_(False)
    layer(rows, weight).backward(dy)
    weight.requires_grad_()
    layer(rows, weight).backward(dy)
    torch.testing.assert_close(total, 3 * expected)


def test_no_rows() -> None:
    rows, weight, bias, _ = problem()
    for recipe in (None, "tensorwise"):
        layer = make_linear(fake.FAKE, settings(recipe) if recipe else None, weight)
        output = layer(rows[:0], weight, bias)
        assert output.shape == (0, 7, 32)
        output.sum().backward()


def test_the_module_adds_nothing_to_a_model() -> None:
    rows, weight, bias, _ = problem()
    for recipe in (None, "tensorwise"):
        layer = make_linear(fake.FAKE, settings(recipe) if recipe else None, weight)
        layer(rows, weight, bias)
        holder = nn.Module()
        holder.linear = layer
        assert not list(holder.parameters()) and not holder.state_dict()


@pytest.mark.parametrize("recipe", [None, "blockwise"])
@pytest.mark.parametrize("main_grads", [False, True])
def test_experts(recipe: str | None, main_grads: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    rows, dy = (torch.randn(21, width, generator=generator, dtype=torch.float64) for width in (16, 32))
    weight = nn.Parameter(torch.randn(3, 32, 16, generator=generator, dtype=torch.float64))
    groups = RowGroups(torch.tensor([9, 0, 12]))
    rows.requires_grad_()
    expected = torch.autograd.grad(grouped_linear(rows, weight, groups), [rows, weight], dy)
    total, done = torch.zeros_like(weight), []
    if main_grads:
        attach_main_grad(weight, total, done.append)
    layer = make_grouped_linear(fake.FAKE, settings(recipe) if recipe else None, weight)
    layer(rows, weight, groups).backward(dy)
    torch.testing.assert_close(rows.grad, expected[0])
    torch.testing.assert_close(total if main_grads else weight.grad, expected[1])
    nothing = layer(rows[:0], weight, RowGroups(torch.zeros(3, dtype=torch.int64)))
    nothing.sum().backward()
    assert nothing.shape == (0, 32) and len(done) == 2 * main_grads
