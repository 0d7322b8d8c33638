"""Work of several modules is added up."""

import torch

from megatron.diagnosis.planning.work import AttentionWork, Product, Work


def test_work_adds_up() -> None:
    layer = Work(layers=1)
    layer.products[Product(4, 8, 16, torch.bfloat16)] += 1
    layer.products[Product(12, 8, 2, torch.bfloat16, experts=True, weights=5)] += 2
    layer.attention[AttentionWork(4, 2.5, 3, 8, 6)] += 1
    layer.states["mamba"] += 7
    layer.move("norms", 10.4, 20)
    layer.move("biases", 0, 3, kernels=1)
    whole = Work()
    whole.add(layer)
    whole.add(layer, times=2)
    assert (whole.layers, whole.kernels, whole.states["mamba"]) == (3, 9, 21)
    assert whole.forward_bytes.total() + whole.backward_bytes.total() == 99
    assert whole.weights(experts=False) == 3 * 8 * 16 and whole.weights(experts=True) == 3 * 2 * 5 * 8 * 2
    assert sum(count * each.flops for each, count in whole.attention.items()) == 3 * 2 * 4 * 2.5 * 3 * 14
    assert layer.products.total() == 3  # it is left as it was


def test_products_describe_themselves() -> None:
    assert Product(1, 2, 3, torch.float32).describe() == "1 x 2 x 3 float32"
    assert Product(1, 2, 3, torch.bfloat16, fp8=True, experts=True).describe() == "1 x 2 x 3 fp8 (experts, as one)"
