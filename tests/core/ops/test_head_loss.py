"""The output layer with its loss, against the two in a row."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.distributed.main_grad import WeightGradientQueue, attach_main_grad
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.ops.head_loss import head_loss


@pytest.mark.parametrize("chunk", [None, 1, 4, 6])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_loss_and_gradients(cap: float | None, chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((6, 4), (9, 4), (9,))
    )
    labels = torch.tensor([0, 3, 6, 2, 5, -1])  # the last token has no loss; columns 7 and 8 are padding
    logits = F.linear(hidden, weight, bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(logits[:, :7], labels, ignore_index=-1, reduction="none")
    found = head_loss(hidden, weight, bias, labels, 7, cap=cap, chunk=chunk)
    assert torch.allclose(found, expected, rtol=1e-12)
    dy = torch.randn(6, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad(loss, (hidden, weight, bias), dy) for loss in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-13)


def test_chunks_are_one_contribution_to_the_main_gradient() -> None:
    """Rows of another length have another number of chunks. Overlapped reductions count contributions, and a reduction
    that has begun cannot take another one."""
    weight, expected, contributions = torch.nn.Parameter(torch.randn(9, 4)), torch.zeros(9, 4), []
    attach_main_grad(weight, torch.zeros(9, 4), contributions.append)
    queue = WeightGradientQueue([weight])
    for number, tokens in enumerate((3, 6, 11)):
        hidden, labels, plain = torch.randn(tokens, 4, requires_grad=True), torch.arange(tokens) % 9, weight.detach()
        loss = head_loss(hidden, plain.requires_grad_(), None, labels, 9).sum()
        of_hidden, of_weight = torch.autograd.grad(loss, (hidden, plain))
        expected += of_weight
        head_loss(hidden, weight, None, labels, 9, chunk=4).sum().backward()
        assert len(contributions) == number + 1
        assert torch.allclose(hidden.grad, of_hidden, atol=1e-6)  # type: ignore[arg-type]
        assert torch.allclose(weight.main_grad, expected, atol=1e-6)  # type: ignore[arg-type]
    for defers in (queue.defer(0), queue.deferred()):  # a deferred product would keep the gradients of a chunk's logits
        with defers:
            head_loss(hidden, weight, None, labels, 9, chunk=4).sum().backward()
            expected += of_weight
            assert torch.allclose(weight.main_grad, expected, atol=1e-6)  # type: ignore[arg-type]
    assert len(contributions) == 5
    head_loss(hidden, weight, None, labels, 9, chunk=4, trains_weight=False).sum().backward()
    assert len(contributions) == 5


def test_chunks_keep_no_logits() -> None:
    """Between forward and backward nothing as large as a chunk's logits exists."""
    hidden, weight = torch.randn(12, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    labels, rows, kept = torch.arange(12), [], []

    def loss(logits: torch.Tensor, *arguments: object, **more: object) -> torch.Tensor:
        rows.append(len(logits))
        return cross_entropy(logits, *arguments, **more)  # type: ignore[arg-type]

    for chunk in (None, 5):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t
        ):
            found = head_loss(hidden, weight, None, labels, 50, loss=loss, chunk=chunk)
        assert (max(kept) >= 12 * 50) == (chunk is None)
        found.sum().backward()
    assert rows == [12, 5, 5, 2, 2, 5, 5] or sorted(rows[1:]) == [2, 2, 5, 5, 5, 5]
