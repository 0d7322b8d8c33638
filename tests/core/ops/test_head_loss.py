"""The output layer with its loss, against the two in a row."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.head_loss import head_loss


@pytest.mark.parametrize("cap", [None, 2.0])
def test_loss_and_gradients(cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((6, 4), (9, 4), (9,))
    )
    labels = torch.tensor([0, 3, 6, 2, 5, -1])  # the last token has no loss; columns 7 and 8 are padding
    logits = F.linear(hidden, weight, bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(logits[:, :7], labels, ignore_index=-1, reduction="none")
    found = head_loss(hidden, weight, bias, labels, 7, cap=cap)
    assert torch.allclose(found, expected, rtol=1e-12)
    dy = torch.randn(6, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad(loss, (hidden, weight, bias), dy) for loss in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-13)
