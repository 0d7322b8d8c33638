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
    first: int = 0
    """Channels of a head that stand before those that turn."""


def apply_rope(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn r channels of [s, b, heads, d] or [s, b, groups, heads, d], the first ones after `rotation.first`; the rest
    pass through. The result is contiguous. The angles' functions are rounded to the type of the heads first, as
    published."""
    ones = (1,) * (heads.dim() - 3)
    cos, sin = (angles.to(heads.dtype).unflatten(2, ones) for angles in (rotation.cos, rotation.sin))
    return _Rope.apply(heads, cos, sin, rotation.interleaved, rotation.first)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, skipped: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.skipped = interleaved, skipped
        return _turn(heads, cos, sin, interleaved, skipped)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(output_gradient, cos, -sin, ctx.interleaved, ctx.skipped), None, None, None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, skipped: int) -> Tensor:
    half, end = cos.shape[-1], skipped + 2 * cos.shape[-1]
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    if interleaved:
        first, second = slice(skipped, end, 2), slice(skipped + 1, end, 2)
    else:
        first, second = slice(skipped, skipped + half), slice(skipped + half, end)
    x, y = heads[..., first], heads[..., second]
    torch.sub(x * cos, y * sin, out=turned[..., first])
    torch.add(y * cos, x * sin, out=turned[..., second])
    for passed in (slice(0, skipped), slice(end, None)):
        turned[..., passed] = heads[..., passed]
    return turned
