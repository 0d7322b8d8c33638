"""The embedding lookup: values, and how it hands its gradient to a main gradient."""

import torch
from torch import Tensor, nn

from megatron.core.ops.embedding import accumulate_rows, embedding


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


class WrittenMainGrad:
    """A main gradient that others write, and the calls around the writing."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.gradient, self.calls = torch.ones(shape, dtype=torch.float64), list[str]()

    def begin_write(self) -> None:
        self.calls.append("begin")

    def end_write(self) -> None:
        self.calls.append("end")


def test_a_kernel_adds_the_gradient_to_the_main_gradient() -> None:
    index = torch.tensor([[1, 3, 1], [0, 3, 3]])
    table = nn.Parameter(values(5, 4).detach())
    table.main_grad_accumulator = main_grad = WrittenMainGrad((5, 4))
    dy = values(2, 3, 4, seed=1).detach()
    embedding(index, table, accumulate_rows=accumulate_rows).backward(dy)
    expected = torch.ones(5, 4, dtype=torch.float64).index_add(0, index.view(-1), dy.view(-1, 4))
    assert table.grad is None and main_grad.calls == ["begin", "end"]
    assert torch.allclose(main_grad.gradient, expected)
