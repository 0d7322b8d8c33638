"""Copies of tokens for experts, against loops."""

import pytest
import torch

from megatron.core.ops.moe.permute import ChoiceNumbers, Copies, permute, unpermute

GROUPS = torch.tensor([[2, 0], [0, 1], [2, 1], [1, 0]])


@pytest.mark.parametrize("kept", [None, torch.tensor([[1, 1], [0, 1], [1, 1], [1, 0]]).bool()])
def test_copies_are_sorted_by_group_and_token(kept: torch.Tensor | None) -> None:
    pairs = [(int(GROUPS[t, j]), t, j) for t in range(4) for j in range(2) if kept is None or kept[t, j]]
    copies, choice = ChoiceNumbers(GROUPS if kept is None else torch.where(kept, GROUPS, -1), 3).copies(len(pairs))
    assert copies.source.tolist() == [t for _, t, _ in sorted(pairs)]
    assert choice.tolist() == [2 * t + j for _, t, j in sorted(pairs)]
    for number, (_, t, j) in enumerate(sorted(pairs)):
        assert copies.places[t, j] == number
    assert (copies.places == -1).sum() == 8 - len(pairs)


def test_each_is_the_gradient_of_the_other() -> None:
    copies, _ = ChoiceNumbers(GROUPS, 3).copies(8)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_()
    rows = torch.randn(8, 3, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.equal(permute(tokens, copies), tokens[copies.source])
    assert torch.allclose(unpermute(rows, copies), torch.zeros_like(tokens).index_add(0, copies.source, rows))
    assert torch.autograd.gradcheck(lambda x: permute(x, copies), tokens)
    assert torch.autograd.gradcheck(lambda x: unpermute(x, copies), rows)


def test_copies_of_some_groups_begin_in_given_rows() -> None:
    """Groups 2 and 0, in this order: group 2 has the tokens 0 and 2, group 0 the tokens 0, 1 and 3."""
    numbered = ChoiceNumbers(GROUPS.to(torch.int32), 3)
    assert numbered.counts.tolist() == [3, 3, 2]
    copies, choice = numbered.copies(5, torch.tensor([2, -1, 0]))
    assert copies.source.tolist() == [0, 2, 0, 1, 3]
    assert choice.tolist() == [0, 4, 1, 2, 7]
    assert copies.places.tolist() == [[0, 2], [3, -1], [1, -1], [-1, 4]]


def test_a_sum_is_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    copies = Copies(torch.tensor([0, 0, 0]), torch.tensor([[0, 1, 2]]))
    assert float(unpermute(rows, copies)) == 258.0
