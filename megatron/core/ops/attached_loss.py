"""Auxiliary losses that are attached to a tensor instead of being an output of the model.

Backward starts from the model's output alone. When it reaches the tensor, it also starts at the attached loss. So an
auxiliary loss can be computed anywhere: in a recomputed layer, on a pipeline stage without a loss, in a user's loop.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.utils.autograd_context import AutogradContext


def attach_loss(carrier: Tensor, loss: Tensor, scale: Tensor | None = None) -> Tensor:
    """Returns `carrier` unchanged. In backward the scalar `loss` gets the gradient `scale` (None: 1)."""
    return _AttachedLoss.apply(carrier, loss, scale)


class _AttachedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, carrier: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        assert loss.dim() == 0, tuple(loss.shape)
        ctx.save_for_backward(torch.ones_like(loss) if scale is None else scale.to(loss.dtype))
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient, scale, None
