"""Products of experts' rows, and the moves that bring rows to experts: values, gradients, and main gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed.main_grad import WeightGradientQueue, attach_main_grad
from megatron.core.ops.activation import Activation, squared_relu, weighted_activation
from megatron.core.ops.moe.grouped_linear import RowGroups, grouped_bias, grouped_linear
from megatron.core.ops.moe.permute import ChoiceNumbers, permute, unpermute

SIZES = [3, 0, 4]


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def groups() -> RowGroups:
    return RowGroups(torch.tensor(SIZES))


def test_each_group_has_its_own_weight() -> None:
    x, w = values(7, 5), values(3, 6, 5, seed=1)
    expected = torch.cat([part @ w[i].t() for i, part in enumerate(x.split(SIZES))])
    torch.testing.assert_close(grouped_linear(x, w, groups()), expected)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, groups()), [x, w])


def test_each_group_has_its_own_bias() -> None:
    bias = values(3, 6)
    expected = torch.cat([bias[i].expand(size, 6) for i, size in enumerate(SIZES)])
    assert torch.equal(grouped_bias(bias, groups(), 7), expected)
    assert torch.autograd.gradcheck(lambda b: grouped_bias(b, groups(), 7), [bias])


def test_counts_bounds_and_groups_of_rows() -> None:
    begins, ends = groups().bounds
    assert (begins.tolist(), ends.tolist(), ends.dtype) == ([0, 3, 3], [3, 3, 7], torch.int32)
    assert groups().of_rows(7).tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert list(RowGroups(torch.tensor(SIZES), SIZES).host_sizes) == SIZES


def test_the_sink_gets_the_gradient_at_once_or_later_and_is_told_without_rows_too() -> None:
    weight, on_accumulated = nn.Parameter(values(3, 6, 5).detach()), []
    attach_main_grad(weight, torch.zeros_like(weight), on_accumulated.append)
    queue = WeightGradientQueue([weight])
    x, dy = values(7, 5, seed=1), values(7, 6, seed=2).detach()
    expected = torch.autograd.grad(grouped_linear(x, weight.detach().requires_grad_(), groups()), x, dy)
    grouped_linear(x, weight, groups()).backward(dy)
    at_once = weight.main_grad.clone()
    assert torch.equal(x.grad, expected[0]) and weight.grad is None and len(on_accumulated) == 1
    assert at_once[0].any() and not at_once[1].any()
    torch.testing.assert_close(at_once[2], dy[3:].t() @ x[3:].detach())
    with queue.defer("later"):
        grouped_linear(x, weight, groups()).backward(dy)
    assert torch.equal(weight.main_grad, at_once) and len(on_accumulated) == 1
    queue.compute("later")
    torch.testing.assert_close(weight.main_grad, 2 * at_once)
    assert len(on_accumulated) == 2
    nothing = RowGroups(torch.zeros(3, dtype=torch.int64))
    grouped_linear(values(0, 5), weight, nothing).sum().backward()
    torch.testing.assert_close(weight.main_grad, 2 * at_once)
    assert len(on_accumulated) == 3


def test_the_gradient_is_multiplied_by_the_main_gradients_factor() -> None:
    weight, x, dy = nn.Parameter(values(3, 6, 5).detach()), values(7, 5, seed=1), values(7, 6, seed=2).detach()
    expected = torch.autograd.grad(grouped_linear(x, weight, groups()), weight, dy)[0]
    attach_main_grad(weight, torch.zeros_like(weight), lambda parameter: None, factor=0.3)
    grouped_linear(x, weight, groups()).backward(dy)
    torch.testing.assert_close(weight.main_grad, 0.3 * expected)


def test_gradients_of_narrow_weights_add_up_in_float32() -> None:
    """4096 addends of 1 + 1/128, which bfloat16 would lose one by one."""
    x = torch.ones(4096, 8, dtype=torch.bfloat16)
    weight = nn.Parameter(torch.zeros(1, 8, 8, dtype=torch.bfloat16))
    attach_main_grad(weight, torch.zeros(1, 8, 8), lambda parameter: None)
    dy = torch.full((4096, 8), 1 + 1 / 128, dtype=torch.bfloat16)
    grouped_linear(x, weight, RowGroups(torch.tensor([4096]))).backward(dy)
    assert torch.equal(weight.main_grad, torch.full((1, 8, 8), 4096 * (1 + 1 / 128)))


NUMBERS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])
KEPT = torch.tensor([[True, False], [True, True], [False, False], [True, True]])


def test_copies_lie_by_group_and_then_by_token() -> None:
    copies, choice = ChoiceNumbers(NUMBERS, 3).copies(8)
    assert copies.source.tolist() == [0, 2, 1, 2, 3, 0, 1, 3]
    assert choice.tolist() == [1, 4, 2, 5, 7, 0, 3, 6]
    assert copies.places.tolist() == [[5, 0], [2, 6], [1, 3], [7, 4]]
    copies, choice = ChoiceNumbers(torch.where(KEPT, NUMBERS, -1), 3).copies(5)
    assert copies.source.tolist() == [1, 3, 0, 1, 3]
    assert copies.places.tolist() == [[2, -1], [0, 3], [-1, -1], [4, 1]]


@pytest.mark.parametrize(("kept", "rows"), [(None, 8), (KEPT, 5)])
def test_moves_and_their_gradients(kept: Tensor | None, rows: int) -> None:
    copies, _ = ChoiceNumbers(NUMBERS if kept is None else torch.where(kept, NUMBERS, -1), 3).copies(rows)
    tokens, copied = values(4, 3), values(rows, 3, seed=1)
    assert torch.equal(permute(tokens, copies), tokens[copies.source])
    expected = torch.zeros(4, 3, dtype=torch.float64).index_add(0, copies.source, copied)
    torch.testing.assert_close(unpermute(copied, copies), expected)
    moves: list[tuple[Callable[..., Tensor], Tensor]] = [(permute, tokens), (unpermute, copied)]
    for move, inputs in moves:
        assert torch.autograd.gradcheck(lambda x, move=move: move(x, copies), [inputs])


def test_sums_of_copies_are_rounded_once() -> None:
    """1 + 2^-8 + 2^-8 is 1 in bfloat16 if each sum is rounded, and 1 + 2^-7 if the last is."""
    copies, _ = ChoiceNumbers(torch.tensor([[0, 1, 2]]), 3).copies(3)
    rows = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert unpermute(rows, copies).item() == 1 + 2**-7


def test_weights_count_in_the_wider_type() -> None:
    product, weights = values(3, 8), values(3, seed=1)
    for activation in (Activation(torch.nn.functional.silu, gated=True), Activation(squared_relu)):
        expected = activation(product) * weights[:, None]
        torch.testing.assert_close(weighted_activation(product, None, weights, activation), expected)
    rows = torch.full((1, 2), 3.0, dtype=torch.bfloat16)
    third = torch.tensor([1 / 3])  # 1.0039 if it were rounded first
    assert weighted_activation(rows, None, third, Activation(torch.nn.functional.relu)).tolist() == [[1.0, 1.0]]
