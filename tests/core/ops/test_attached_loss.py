"""A loss tied to a tensor gets its gradient when backward comes by."""

import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.ops.attached_loss import attach_loss


def test_both_gradients_arrive_and_the_carrier_is_unchanged() -> None:
    x, w = torch.randn(3, 2, dtype=torch.float64, requires_grad=True), torch.randn(2, dtype=torch.float64)
    loss = (x * w).square().sum()
    carrier = attach_loss(x * 2, loss, torch.tensor(0.25))
    assert torch.equal(carrier, x * 2)
    carrier.sum().backward()
    torch.testing.assert_close(x.grad, 2 + 0.25 * 2 * x * w * w)


def test_without_a_scale_it_counts_once() -> None:
    x = torch.randn(4, requires_grad=True)
    attach_loss(x, x.square().sum()).sum().backward()
    torch.testing.assert_close(x.grad, 1 + 2 * x)


def test_it_counts_once_in_a_layer_that_is_computed_again() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def layer(y: torch.Tensor) -> torch.Tensor:
        return attach_loss(y.sin(), y.square().sum(), torch.tensor(3.0))

    checkpoint(layer, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, x.cos() + 3 * 2 * x)
