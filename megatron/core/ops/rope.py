"""Rotary position embedding (Su et al. 2021): rotates pairs of channels by an angle proportional to the position."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles of every token: [s, b or 1, 1, r / 2] for r rotated channels per head."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    """True: channels 2i and 2i + 1 form a pair. False: channels i and i + r/2."""
    first: int = 0
    """Number of channels of a head before the rotated ones."""


def rotation_of_angles(angles: Tensor, interleaved: bool, amplitude: float = 1.0) -> Rotation:
    """Returns the rotation by angles [s, 1, 1, r] of `RotaryEmbedding`, which has each angle twice."""
    angle = (angles[..., ::2] if interleaved else angles[..., : angles.shape[-1] // 2]).to(torch.float32)
    return Rotation(angle.cos() * amplitude, angle.sin() * amplitude, interleaved)


def apply_rope(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotates r channels of each head, starting at channel `rotation.first`, and copies the others.

    Heads are [s, b, heads, d] or [s, b, groups, heads, d]; the result is contiguous. The
    rotation is computed in float32 at least, and rounded once.
    """
    ones = (1,) * (heads.dim() - 3)
    dtype = torch.promote_types(heads.dtype, torch.float32)
    cos, sin = (angles.to(dtype).unflatten(2, ones) for angles in (rotation.cos, rotation.sin))
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
