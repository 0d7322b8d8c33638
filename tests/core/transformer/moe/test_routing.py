"""The record of a routing: counts, and Megatron-LM's dense form."""

import torch

from megatron.core.transformer.moe.routing import Routing

EXPERTS = torch.tensor([[0, 2], [2, 1], [3, 2]])
WEIGHTS = torch.tensor([[0.5, 0.25], [0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)


def test_tokens_are_counted_by_expert() -> None:
    assert Routing(EXPERTS, WEIGHTS).tokens_per_expert(5).tolist() == [1, 1, 3, 1, 0]


def test_dropped_tokens_count_nowhere() -> None:
    kept = torch.tensor([[True, False], [True, True], [False, True]])
    routing = Routing(EXPERTS, WEIGHTS, kept)
    assert routing.tokens_per_expert(4).tolist() == [1, 1, 2, 0]
    weights, chosen = routing.dense(4)
    assert chosen.int().tolist() == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]]
    assert weights.tolist() == [[0.5, 0, 0, 0], [0, 0.2, 0.1, 0], [0, 0, 0.4, 0]]


def test_gradients_of_the_dense_form_reach_the_weights() -> None:
    weights = WEIGHTS.clone().requires_grad_()
    dense, _ = Routing(EXPERTS, weights).dense(4)
    (dense * torch.arange(12.0).view(3, 4)).sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [[0, 2], [6, 5], [11, 10]]
