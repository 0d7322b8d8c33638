"""Saved tensors that are kept in host memory between forward and backward."""

import pytest
import torch
from torch import Tensor, nn

from megatron.core.utils.offloaded import MarkedInputs, Offloaded, OffloadLimits, SavedStorage, SavedView, keep_saved

WIDTH = 4


class Layer(nn.Module):
    """x + tanh(x W), with a product of torch, which saves a view of the weight."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)))
        self.product = MarkedInputs(lambda x: x @ self.weight.t(), "product", and_saved=True) if name else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.t() if self.product is None else self.product(x)
        return x + torch.tanh(y)


def run(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def gradients(layers: list[Layer], runner) -> list[Tensor]:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y = x * 1.0
    for layer in layers:
        y = runner([layer], y)
    y.sum().backward()
    return [x.grad, *(layer.weight.grad for layer in layers)]


@pytest.mark.parametrize("marked", [False, True])
def test_weights_stay_and_gradients_are_equal(marked, monkeypatch):
    sent: list[int] = []
    start = SavedStorage.start_offload
    monkeypatch.setattr(SavedStorage, "start_offload", lambda one: (sent.append(one.numel), start(one))[1])
    layers = [Layer("product" if marked else "") for _ in range(3)]
    offloaded = Offloaded(run, layers[0], OffloadLimits(), None if marked else lambda layer: layer is not layers[2])
    found = gradients(layers, offloaded)
    assert sent == [3 * WIDTH] * (3 if marked else 4)  # x of each product; of two whole layers, tanh's result too
    plain = gradients([Layer(), Layer(), Layer()], run)
    assert all(map(torch.equal, found, plain))


def test_the_graph_can_be_used_twice():
    layers = [Layer("product") for _ in range(3)]
    offloaded = Offloaded(run, layers[0], OffloadLimits())
    x = torch.ones(2, WIDTH, requires_grad=True)
    y = x
    for layer in layers:
        y = offloaded([layer], y)
    once = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(once[0], torch.autograd.grad(y.sum(), x)[0])


def test_views_of_one_storage_are_moved_once():
    """One is saved before the marked call. The views come back with their own shapes."""
    views: list[SavedView] = []

    def body(layers, x):
        whole = torch.arange(12.0).view(3, 4)
        views.append(keep_saved(whole[1]))
        MarkedInputs(lambda part: views.append(keep_saved(part)), "part")(whole[:, 1:3])
        views.append(keep_saved(torch.ones(2)))
        return x

    layer = nn.Identity()
    Offloaded(body, layer, OffloadLimits(max_in_flight=0))([layer], torch.ones(1))
    first, second, other = views
    assert first.storage is second.storage
    assert first.storage._storage is None and other.storage._storage is not None
    assert torch.equal(first.tensor(), torch.arange(4.0, 8.0))
    assert torch.equal(second.tensor(), torch.arange(12.0).view(3, 4)[:, 1:3])
    assert torch.equal(other.tensor(), torch.ones(2))


def test_the_layer_before_comes_back_ahead():
    layers = [Layer("product") for _ in range(4)]
    offloaded = Offloaded(run, layers[0], OffloadLimits(max_in_flight=0))
    storages: list[SavedStorage] = []
    start = SavedStorage.start_offload
    y = torch.ones(2, WIDTH, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedStorage, "start_offload", lambda one: (storages.append(one), start(one))[1])
        for layer in layers:
            y = offloaded([layer], y)
    assert [one._storage is not None for one in storages] == [False] * 4
    storages[3].on_device()
    assert [one._storage is not None for one in storages] == [False, False, True, True]
