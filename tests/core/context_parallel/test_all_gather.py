"""Whole rows from the parts of pretended ranks, and gradients against a cut of the summed gradient."""

import pytest
import torch
from torch import Tensor

from megatron.core.communication.collectives import Group, PlannedGroup
from megatron.core.context_parallel import all_gather
from megatron.core.context_parallel.all_gather import gather_whole_rows
from megatron.core.context_parallel.splitting import cut_rows, in_rank_order
from megatron.core.tokens import SequencePart


def gathered(monkeypatch: pytest.MonkeyPatch, row: Tensor, gradients: list[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """The whole row on one rank, and the gradient of its part, if each rank q has the gradient gradients[q]."""
    ranks = len(gradients)
    parts = [cut_rows(row, SequencePart(number, ranks), 0) for number in range(ranks)]

    def all_to_all(tensor: Tensor, group: Group) -> Tensor:
        assert torch.equal(tensor, in_rank_order(gradients[rank], ranks))
        return torch.cat([in_rank_order(gradient, ranks).chunk(ranks)[rank] for gradient in gradients])

    monkeypatch.setattr(all_gather, "gather_rows", lambda part, group: torch.cat(parts))
    monkeypatch.setattr(all_gather, "all_to_all_rows", all_to_all)
    part = parts[rank].requires_grad_()
    found = gather_whole_rows(part, PlannedGroup(tuple(range(ranks)), rank), ranks)
    found.backward(gradients[rank])
    assert part.grad is not None
    return found.detach(), part.grad


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_are_whole_and_gradients_are_summed(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    row = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = [torch.randn_like(row, generator=torch.Generator().manual_seed(1 + number)) for number in range(ranks)]
    total = torch.stack(gradients).sum(0)
    for rank in range(ranks):
        found, gradient = gathered(monkeypatch, row, gradients, rank)
        assert torch.equal(found, row)
        torch.testing.assert_close(gradient, cut_rows(total, SequencePart(rank, ranks), 0), rtol=1e-14, atol=1e-15)


def test_narrow_gradients_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 + 1 + 1 + 1 is 256 where every sum is rounded to bfloat16, and 260 where the whole is."""
    gradients = [torch.full((8, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    _, gradient = gathered(monkeypatch, torch.zeros(8, 1, dtype=torch.bfloat16), gradients, 2)
    assert gradient.dtype is torch.bfloat16 and gradient.eq(260.0).all()


def test_one_rank_has_whole_rows_already() -> None:
    part = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
    found = gather_whole_rows(part, None, 1)
    found.backward(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    assert torch.equal(found, part)
    assert part.grad is not None and part.grad.tolist() == [1.0, 2.0, 3.0, 4.0]
