"""Rotary positions on a GPU: one kernel per direction. They read heads in place inside a packed projection."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.rope import Rotation, apply_rope
from megatron.core.ops.tiles import cdiv, next_power_of_2

_TILE = 2048
"""Pairs of channels that a program rotates at once."""


@triton.jit
def _rope_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    rotated, heads, cos, sin, batch, count, per_group, width, half, first, end,
    rotated_s, rotated_b, rotated_g, rotated_h, heads_s, heads_b, heads_g, heads_h, cos_s, cos_b, sin_s, sin_b,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, COPIES_REST: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    dtype = heads.dtype.element_ty
    cosine = tl.load(cos + s * cos_s + b * cos_b + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + s * sin_s + b * sin_b + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        sine = -sine
    group, inner = head // per_group, head % per_group
    source = heads + s * heads_s + b * heads_b + (group * heads_g + inner * heads_h)[:, None]
    target = rotated + s * rotated_s + b * rotated_b + (group * rotated_g + inner * rotated_h)[:, None]
    if INTERLEAVED:
        one, other = first + 2 * pair, first + 2 * pair + 1
    else:
        one, other = first + pair, first + half + pair
    valid = (head < count)[:, None] & (pair < half)[None, :]
    x = tl.load(source + one[None, :], mask=valid, other=0.0).to(tl.float32)
    y = tl.load(source + other[None, :], mask=valid, other=0.0).to(tl.float32)
    tl.store(target + one[None, :], (x * cosine - y * sine).to(dtype), mask=valid)
    tl.store(target + other[None, :], (y * cosine + x * sine).to(dtype), mask=valid)
    if COPIES_REST:
        channel = tl.arange(0, WIDTH)
        rest = (channel < first) | ((channel >= end) & (channel < width))
        valid = (head < count)[:, None] & rest[None, :]
        tl.store(target + channel[None, :], tl.load(source + channel[None, :], mask=valid), mask=valid)


def apply_rope_triton(heads: Tensor, rotation: Rotation) -> Tensor:
    """Computes `rope.apply_rope` in one kernel, in float32 with one rounding. Float64 uses the reference."""
    if heads.dtype is torch.float64:
        return apply_rope(heads, rotation)
    return apply_rope(heads, rotation, _rotate)


def _rotate(rotated: Tensor, heads: Tensor, rotation: Rotation, inverse: bool) -> None:
    if heads.stride(-1) != 1:
        heads = heads.contiguous()
    cos, sin = (last_contiguous(angles) for angles in (rotation.cos, rotation.sin))
    s, b, *counts, width = heads.shape
    count, per_group = math.prod(counts), counts[-1]
    half, first = cos.shape[-1], rotation.first
    end = first + 2 * half
    if rotated.numel():
        pairs = next_power_of_2(half)
        at_once = max(1, min(next_power_of_2(count), _TILE // pairs))
        _rope_kernel[(s * b, cdiv(count, at_once))](
            rotated, heads, cos, sin, b, count, per_group, width, half, first, end,
            *strides_of_heads(rotated), *strides_of_heads(heads), *strides_of_angles(cos, sin),
            INTERLEAVED=rotation.interleaved, INVERSE=inverse, COPIES_REST=2 * half < width,
            HEADS=at_once, HALF=pairs, WIDTH=next_power_of_2(width),
        )  # fmt: skip


def last_contiguous(angles: Tensor) -> Tensor:
    """Returns angles whose last dimension is contiguous."""
    return angles if angles.stride(-1) == 1 else angles.contiguous()


def strides_of_heads(heads: Tensor) -> tuple[int, int, int, int]:
    """Returns the strides of positions, rows, groups of heads (0 without groups) and heads of `heads`."""
    s, b, *strides, _ = heads.stride()
    return s, b, strides[0] if len(strides) > 1 else 0, strides[-1]


def strides_of_angles(cos: Tensor, sin: Tensor) -> tuple[int, int, int, int]:
    """Returns the strides of positions and rows of `cos`, then of `sin`; 0 for rows that have the same angles."""
    cos_b, sin_b = (0 if angles.shape[1] == 1 else angles.stride(1) for angles in (cos, sin))
    return cos.stride(0), cos_b, sin.stride(0), sin_b
