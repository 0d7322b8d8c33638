"""Rotary position embedding (Su et al. 2021): rotates pairs of channels by an angle proportional to the position."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.split_columns import new_gradient_of
from megatron.core.utils.autograd_context import AutogradContext


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles of every token: [s, b or 1, 1, r / 2] for r rotated channels per head."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    """True: channels 2i and 2i + 1 form a pair. False: channels i and i + r/2."""
    first: int = 0
    """Number of channels of a head before the rotated ones."""


Rotate = Callable[[Tensor, Tensor, Rotation, bool], None]
"""Writes to its first argument the heads of the second, rotated by the angles; with True by their negatives."""


def rotation_of_angles(angles: Tensor, interleaved: bool, amplitude: float = 1.0) -> Rotation:
    """Returns the rotation by the angles [s, 1, 1, r] of `RotaryEmbedding`, in which each angle occurs twice.

    Cosines and sines are multiplied by `amplitude`."""
    angle = (angles[..., ::2] if interleaved else angles[..., : angles.shape[-1] // 2]).to(torch.float32)
    return Rotation(angle.cos() * amplitude, angle.sin() * amplitude, interleaved)


def apply_rope(heads: Tensor, rotation: Rotation, rotate: Rotate | None = None) -> Tensor:
    """Returns heads with r channels of each rotated, from channel `rotation.first` on, and the others copied.

    Heads are [s, b, heads, d] or [s, b, groups, heads, d], and so is the result, which is contiguous. The rotation is
    computed in float32 or wider and rounded once. `rotate` is a faster implementation.
    """
    return _Rope.apply(heads, rotation, rotate or _rotate)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, heads: Tensor, rotation: Rotation, rotate: Rotate) -> Tensor:
        ctx.save_for_backward(rotation.cos, rotation.sin)
        ctx.interleaved, ctx.first, ctx.rotate = rotation.interleaved, rotation.first, rotate
        ctx.new_gradient = new_gradient_of(heads)
        rotated = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        rotate(rotated, heads, rotation, False)
        return rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        gradient = ctx.new_gradient()
        ctx.rotate(gradient, output_gradient, Rotation(cos, sin, ctx.interleaved, ctx.first), True)
        return gradient, None, None


def _rotate(rotated: Tensor, heads: Tensor, rotation: Rotation, inverse: bool) -> None:
    ones = (1,) * (heads.dim() - 3)
    dtype = torch.promote_types(heads.dtype, torch.float32)
    cos, sin = (angles.to(dtype).unflatten(2, ones) for angles in (rotation.cos, rotation.sin))
    sin = -sin if inverse else sin
    half, first = cos.shape[-1], rotation.first
    end = first + 2 * half
    if rotation.interleaved:
        one, other = slice(first, end, 2), slice(first + 1, end, 2)
    else:
        one, other = slice(first, first + half), slice(first + half, end)
    x, y = heads[..., one], heads[..., other]
    torch.sub(x * cos, y * sin, out=rotated[..., one])
    torch.add(y * cos, x * sin, out=rotated[..., other])
    for rest in (slice(0, first), slice(end, heads.shape[-1])):
        if rest.start < rest.stop:
            rotated[..., rest] = heads[..., rest]
