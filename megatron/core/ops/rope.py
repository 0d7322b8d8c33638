"""Rotary position embedding (Su et al. 2021): pairs of channels turned by an angle that grows with the position."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of every token's angles: [s, b or 1, 1, r / 2] for r turned channels of a head."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    """Pairs are (2i, 2i + 1); otherwise (i, i + r/2)."""


def apply_rope(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first r channels of [s, b, heads, d]; the rest pass through. The angles' functions are rounded to the
    type of the heads first, as published."""
    cos, sin = rotation.cos.to(heads.dtype), rotation.sin.to(heads.dtype)
    return _Rope.apply(heads, cos, sin, rotation.interleaved)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(heads, cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(output_gradient, cos, -sin, ctx.interleaved), None, None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    x, y = heads[..., first], heads[..., second]
    torch.sub(x * cos, y * sin, out=turned[..., first])
    torch.add(y * cos, x * sin, out=turned[..., second])
    turned[..., 2 * half :] = heads[..., 2 * half :]
    return turned
