"""The soft cap c tanh(x / c)."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.precision import at_least_float32
from megatron.core.utils.autograd_context import AutogradContext

_NUMBERS_AT_ONCE = 1 << 25


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns cap * tanh(x / cap) (Bello et al. 2016), computed in float32 at least and rounded once. Backward keeps
    only the result."""
    return _SoftCap.apply(x, cap)


class _SoftCap(torch.autograd.Function):
    """d/dx = 1 - (y / cap)^2."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, cap: float) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows in _row_blocks(x):
            y[rows] = torch.tanh(x[rows].to(at_least_float32(x.dtype)) / cap).mul_(cap).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.cap = cap
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        result = torch.empty_like(y)
        for rows in _row_blocks(y):
            slope = (y[rows].to(at_least_float32(y.dtype)) / ctx.cap).square_().neg_().add_(1.0)
            result[rows] = slope.mul_(gradient[rows]).to(y.dtype)
        return result, None


def _row_blocks(x: Tensor) -> list[slice]:
    count = max(1, _NUMBERS_AT_ONCE // max(1, x[:1].numel()))
    return [slice(first, first + count) for first in range(0, x.shape[0], count)]
