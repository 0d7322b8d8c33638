"""The embedding lookup: values, and how it hands its gradient to a main gradient."""

import torch
from torch import Tensor, nn

from megatron.core.ops.embedding import embedding


class MainGrad:
    """Keeps the rows that it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, Tensor]] = []

    def add_rows(self, index: Tensor, gradient: Tensor) -> None:
        self.rows.append((index, gradient))


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_embedding() -> None:
    index = torch.tensor([[1, 3, 1], [0, 3, 3]])
    table = nn.Parameter(values(5, 4).detach())
    dy = values(2, 3, 4, seed=1).detach()
    output = embedding(index, table)
    assert torch.equal(output, table[index])
    output.backward(dy)
    expected = torch.zeros(5, 4, dtype=torch.float64).index_add(0, index.view(-1), dy.view(-1, 4))
    assert torch.allclose(table.grad, expected)
    table.grad, table.main_grad_accumulator = None, MainGrad()
    embedding(index, table).backward(dy)
    ((rows, gradient),) = table.main_grad_accumulator.rows
    assert table.grad is None and torch.equal(rows, index.view(-1)) and torch.equal(gradient, dy.view(-1, 4))
