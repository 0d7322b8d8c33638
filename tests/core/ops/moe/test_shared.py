"""The input and the outputs that routed and shared experts have in common."""

import pytest
import torch
from torch import Tensor, nn

from megatron.core.ops.moe.shared import add_shared, read_input, sum_gradients


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_gate_multiplies_the_shared_output_alone() -> None:
    routed, shared, logits = numbers(5, 4), numbers(5, 4, seed=1), numbers(5, 1, seed=2)
    assert torch.equal(add_shared(routed, shared), routed + shared)
    gated = routed + shared / (1.0 + torch.exp(-logits))
    torch.testing.assert_close(add_shared(routed, shared, logits), gated)
    torch.testing.assert_close(add_shared(routed, shared, logits, 2.0 * routed), gated + 2.0 * routed)


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_all_readers_are_summed_once(gated: bool) -> None:
    hidden, sums = numbers(5, 4).requires_grad_(), []
    weight = nn.Parameter(numbers(1, 4, seed=1)) if gated else None

    def counted(gradients: list[Tensor], logits_gradient: Tensor | None, weight: Tensor | None) -> Tensor:
        sums.append((len(gradients), logits_gradient is not None))
        return sum_gradients(gradients, logits_gradient, weight)

    read = read_input(hidden, weight, counted)
    assert read.for_shared.data_ptr() == hidden.data_ptr()
    total = (read.for_router * numbers(5, 4, seed=2)).sum() + read.for_dispatch.square().sum() + read.for_shared.sum()
    expected = numbers(5, 4, seed=2) + 2.0 * hidden.detach() + 1.0
    if weight is not None:
        assert read.gate_logits is not None
        torch.testing.assert_close(read.gate_logits, hidden @ weight.t())
        total = total + (read.gate_logits * numbers(5, 1, seed=3)).sum()
        expected = expected + numbers(5, 1, seed=3) @ weight.detach()
    total.backward()
    torch.testing.assert_close(hidden.grad, expected)
    assert sums == [(3, gated)]
    if weight is not None:
        torch.testing.assert_close(weight.grad, numbers(5, 1, seed=3).t() @ hidden.detach())


def test_the_gate_gives_its_gradient_to_the_main_gradient() -> None:
    weight, given = nn.Parameter(numbers(1, 4)), []

    class Sink:
        def add_product(self, rows: Tensor, columns: Tensor) -> None:
            given.append(rows.t() @ columns)

    weight.main_grad_accumulator = Sink()  # type: ignore[attr-defined]
    hidden = numbers(5, 4, seed=1)  # without a gradient
    logits = read_input(hidden, weight).gate_logits
    assert logits is not None
    logits.sum().backward()
    torch.testing.assert_close(given[0], hidden.sum(0, keepdim=True))
    assert weight.grad is None


def test_unused_views_have_no_gradient() -> None:
    hidden = numbers(5, 4).requires_grad_()
    read_input(hidden).for_dispatch.sum().backward()
    assert hidden.grad is not None and torch.equal(hidden.grad, torch.ones(5, 4, dtype=torch.float64))
