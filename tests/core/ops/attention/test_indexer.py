"""The indexer's scores, choice and loss against the formulas written out, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.ops.attention import indexer
from megatron.core.ops.attention.indexer import index_scores, indexer_loss, unselected_keys

LENGTH, ROWS, HEADS, WIDTH, SCALE = 7, 2, 3, 4, 0.3


@pytest.fixture(params=[1 << 25, 1], ids=["at once", "query by query"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "SCORES_AT_ONCE", request.param)


def inputs() -> tuple[Tensor, ...]:
    """Query, key and weight of the indexer, then query and key of attention with two heads."""
    torch.manual_seed(0)
    shapes = [(HEADS, WIDTH), (WIDTH,), (HEADS,), (2, 5), (2, 5)]
    return tuple(torch.randn(LENGTH, ROWS, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def causal(first: int, rows: int) -> Tensor:
    return (torch.arange(LENGTH) > torch.arange(first, first + rows)[:, None])[None]


def plain_score(query: Tensor, key: Tensor, weight: Tensor, row: int, t: int, s: int, relu: bool) -> Tensor:
    products = [query[t, row, head] @ key[s, row] for head in range(HEADS)]
    return sum((product.clamp(min=0) if relu else product) * weight[t, row, j] for j, product in enumerate(products))


@pytest.mark.parametrize("relu", [True, False])
def test_scores(relu: bool) -> None:
    query, key, weight, *_ = inputs()
    scores = index_scores(query, key, weight, relu)
    for row, t, s in [(0, 0, 0), (1, 2, 6), (0, 5, 3)]:
        torch.testing.assert_close(scores[row, t, s], plain_score(query, key, weight, row, t, s, relu))


@pytest.mark.usefixtures("blocks")
def test_each_query_keeps_the_best_keys_that_it_sees() -> None:
    query, key, weight, *_ = inputs()
    left_out = unselected_keys(query, key, weight, causal, 3)
    scores = index_scores(query, key, weight)
    for row in range(ROWS):
        for t in range(LENGTH):
            best = sorted(range(t + 1), key=lambda s: -scores[row, t, s].item())[:3]
            assert [s for s in range(LENGTH) if not left_out[row, 0, t, s]] == sorted(best)


def test_of_equal_scores_the_earlier_keys_are_kept() -> None:
    query, key, weight, *_ = inputs()
    left_out = unselected_keys(query, key, torch.zeros_like(weight), causal, 2)
    assert (~left_out[0, 0, -1]).nonzero().flatten().tolist() == [0, 1]


def plain_loss(tensors: tuple[Tensor, ...], visible: Callable[[int, int], list[int]]) -> Tensor:
    query, key, weight, attention_query, attention_key = tensors
    total = query.new_zeros(())
    for row in range(ROWS):
        for t in range(LENGTH):
            seen = visible(row, t)
            index = torch.stack([plain_score(query, key, weight, row, t, s, True) for s in seen]).log_softmax(0)
            heads = [
                torch.stack([SCALE * attention_query[t, row, head] @ attention_key[s, row, head] for s in seen])
                for head in range(2)
            ]
            wanted = (sum(scores.softmax(0) for scores in heads) / 2).detach()
            total = total + (wanted * (wanted.log() - index)).sum()
    return total


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("sparse", [False, True])
def test_loss_and_gradients(sparse: bool) -> None:
    tensors = inputs()
    left_out = unselected_keys(*tensors[:3], causal, 3)[:, 0]

    def hidden(first: int, rows: int) -> Tensor:
        return left_out[:, first : first + rows] if sparse else causal(first, rows)

    def visible(row: int, t: int) -> list[int]:
        return [s for s in range(t + 1) if not (sparse and left_out[row, t, s])]

    loss = indexer_loss(tensors[:3], (*tensors[3:], SCALE), hidden)
    expected = plain_loss(tensors, visible)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    found = torch.autograd.grad(0.7 * loss, tensors[:3])
    for one, other in zip(found, torch.autograd.grad(0.7 * expected, tensors[:3]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
