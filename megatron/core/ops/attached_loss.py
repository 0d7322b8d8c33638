"""A loss that is not the model's output, tied to a tensor it was computed beside.

Whoever runs backward starts from the output alone; the attached loss gets its gradient when backward comes by the
tensor it is tied to. So it may be born anywhere: in a layer that is computed again in backward, on a pipeline stage
that has no loss, in a user's own loop.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def attach_loss(carrier: Tensor, loss: Tensor, scale: Tensor | None = None) -> Tensor:
    """`carrier`, unchanged; in backward the scalar `loss` gets the gradient `scale` (None: 1)."""
    return _AttachedLoss.apply(carrier, loss, scale)


class _AttachedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        assert loss.dim() == 0, tuple(loss.shape)
        ctx.save_for_backward(torch.ones_like(loss) if scale is None else scale.to(loss.dtype))
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient, scale, None
