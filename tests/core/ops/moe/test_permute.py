"""Copies of tokens for experts, against loops."""

import pytest
import torch

from megatron.core.ops.moe.permute import copies_by_group, permute, unpermute

GROUPS = torch.tensor([[2, 0], [0, 1], [2, 1], [1, 0]])


@pytest.mark.parametrize("kept", [None, torch.tensor([[1, 1], [0, 1], [1, 1], [1, 0]]).bool()])
def test_copies_are_sorted_by_group_and_token(kept: torch.Tensor | None) -> None:
    pairs = [(int(GROUPS[t, j]), t, j) for t in range(4) for j in range(2) if kept is None or kept[t, j]]
    copies, choice = copies_by_group(GROUPS, kept, len(pairs), 3)
    assert copies.source.tolist() == [t for _, t, _ in sorted(pairs)]
    assert choice.tolist() == [2 * t + j for _, t, j in sorted(pairs)]
    for number, (_, t, j) in enumerate(sorted(pairs)):
        assert copies.places[t, j] == number
    assert (copies.places == -1).sum() == 8 - len(pairs)


def test_each_is_the_gradient_of_the_other() -> None:
    copies, _ = copies_by_group(GROUPS, None, 8, 3)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_()
    rows = torch.randn(8, 3, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.equal(permute(tokens, copies), tokens[copies.source])
    assert torch.allclose(unpermute(rows, copies), torch.zeros_like(tokens).index_add(0, copies.source, rows))
    assert torch.autograd.gradcheck(lambda x: permute(x, copies), tokens)
    assert torch.autograd.gradcheck(lambda x: unpermute(x, copies), rows)
