"""The first module whose output or gradient is not finite."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.training.log.non_finite_search import (
    BACKWARD,
    FORWARD,
    LOSS,
    WEIGHT,
    WEIGHT_GRADIENT,
    Finding,
    NonFiniteSearch,
    canonical_modules,
    depth_in_model,
    in_order,
)


class _Spoil(torch.autograd.Function):
    """The input; an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


class Layer(nn.Module):
    """A linear layer that fails in one micro-batch, in the forward or the backward pass."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.canonical_index = number
        self.linear = nn.Linear(3, 3)
        self.fails: tuple[str, int] | None = None
        self.calls = 0

    def forward(self, values: Tensor) -> Tensor:
        values = self.linear(values)
        how, call = self.fails or ("", -1)
        self.calls += 1
        if self.calls - 1 != call:
            return values
        return values * torch.inf if how == "forward" else _Spoil.apply(values)


class Chunk(nn.Module):
    """Layers 4 and 5 of a model, and what wraps them."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential()
        self.module.add_module("layers", nn.ModuleList([Layer(4), Layer(5)]))
        self.recomputes = False

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.module.layers:
            if self.recomputes:
                values = torch.utils.checkpoint.checkpoint(layer, values, use_reentrant=False)
            else:
                values = layer(values)
        return values

    def weight_chunks(self) -> list[Any]:
        return [_Named(name, parameter.detach()) for name, parameter in self.module.named_parameters()]

    def gradient_chunks(self) -> list[Any]:
        return [_Named(name, parameter.grad) for name, parameter in self.module.named_parameters()]


class _Named:
    def __init__(self, name: str, flat: Tensor) -> None:
        self.name, self.flat = name, flat


def search(chunk: Chunk, loss_factor: float = 1.0) -> list[Finding]:
    """Two micro-batches, both forward passes before both backward passes."""

    def forward_step(data: Any, model: nn.Module) -> Any:
        return model(next(data)), lambda output: (output.sum() * loss_factor, {})

    data = iter([torch.ones(2, 3), torch.ones(2, 3)])
    with NonFiniteSearch([chunk], rank=3) as found:
        step = found.watch(forward_step)
        losses = [function(output)[0] for output, function in (step(data, chunk), step(data, chunk))]
        for loss in losses:
            loss.backward()
        found.see_gradients()
    assert not any(module._forward_hooks for module in chunk.modules())
    return found.findings([[10, 11], [12, 13]])


def test_nothing_is_found_where_all_is_finite() -> None:
    assert search(Chunk()) == []


@pytest.mark.parametrize("call", [0, 1])
def test_the_layer_that_overflows_is_named(call: int) -> None:
    chunk = Chunk()
    chunk.module.layers[1].fails = "forward", call
    first = search(chunk)[0]
    assert (first.phase, first.name, first.microbatch) == (FORWARD, "layers.5", call)
    assert str(first).startswith(f"rank 3: output of layers.5 in micro-batch {call}, samples [{10 + 2 * call}, ")


@pytest.mark.parametrize("call", [0, 1])
def test_the_first_bad_gradient_is_named(call: int) -> None:
    """The gradient is good at the output of layer 5, and bad where it leaves its last operation."""
    chunk = Chunk()
    chunk.module.layers[1].fails = "backward", call
    found = search(chunk)
    assert (found[0].phase, found[0].name, found[0].microbatch) == (BACKWARD, "layers.5.linear", call)
    assert {finding.phase for finding in found[1:]} == {WEIGHT_GRADIENT}


def test_a_loss_function() -> None:
    found = search(Chunk(), loss_factor=torch.inf)
    assert [(each.phase, each.name, each.microbatch) for each in found[:2]] == [(FORWARD, LOSS, 0), (FORWARD, LOSS, 1)]


def test_a_weight_comes_first() -> None:
    chunk = Chunk()
    chunk.module.layers[0].linear.weight.data[0, 1] = torch.nan
    found = search(chunk)
    assert (found[0].phase, found[0].name, found[0].bad, found[0].elements) == (WEIGHT, "layers.0.linear.weight", 1, 9)
    assert found[1].name == "layers.4.linear"


def test_names_and_order_over_the_whole_model() -> None:
    assert [name for name, _ in canonical_modules(Chunk())] == [
        "layers", "layers.4", "layers.4.linear", "layers.5", "layers.5.linear",
    ]  # fmt: skip
    assert [depth_in_model(name) for name in ("embedding", "decoder.layers.7.mlp", "output_layer")] == [
        -1,
        7,
        torch.inf,
    ]
    forward = [Finding(rank, FORWARD, f"layers.{layer}", 1, 1, 0) for rank, layer in ((0, 9), (1, 2))]
    backward = [Finding(rank, BACKWARD, f"layers.{layer}", 1, 1, 0) for rank, layer in ((0, 2), (1, 9))]
    assert [finding.rank for finding in in_order([*backward, *forward])] == [1, 0, 1, 0]
    assert Finding.from_json({**vars(forward[0]), "sample_ids": []}) == forward[0]
