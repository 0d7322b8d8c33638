"""Backward of `split_heads` on a GPU: one kernel copies the gradients of queries, gates, keys and values into the
gradient of the packed projection, and rotates those of rotated heads back. The gradients may have any strides."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.rope import Rotation, apply_rope
from megatron.core.ops.rope_triton import apply_rope_triton, last_contiguous, rotate_triton, strides_of_angles
from megatron.core.ops.tiles import next_power_of_2


@triton.jit
def _copy(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    target, source, s, b, stride_s, stride_b, stride_g, stride_h, first, size, heads, width, count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copies one part of a token, `size` heads of each of `count` / `size` groups, to its place in the packed token."""
    head, channel = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    valid = (head < count)[:, None] & (channel < width)[None, :]
    group, inner = head // size, head % size
    at = s * stride_s + b * stride_b + (group * stride_g + inner * stride_h)[:, None] + channel[None, :]
    to = ((group * heads + first + inner) * width)[:, None] + channel[None, :]
    tl.store(target + to, tl.load(source + at, mask=valid), mask=valid)


@triton.jit
def _copy_rotated_back(  # type: ignore[no-untyped-def]
    target, source, s, b, stride_s, stride_b, stride_g, stride_h, first, size, heads, width, count,
    cos, sin, cos_s, cos_b, sin_s, sin_b, start, half,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COPIES_REST: tl.constexpr,
):  # fmt: skip
    """Copies one part of a token like `_copy`, and rotates its rotated channels back."""
    head, pair = tl.arange(0, HEADS), tl.arange(0, HALF)
    cosine = tl.load(cos + s * cos_s + b * cos_b + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sine = -tl.load(sin + s * sin_s + b * sin_b + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    if INTERLEAVED:
        one, other = start + 2 * pair, start + 2 * pair + 1
    else:
        one, other = start + pair, start + half + pair
    group, inner = head // size, head % size
    at = source + s * stride_s + b * stride_b + (group * stride_g + inner * stride_h)[:, None]
    to = target + ((group * heads + first + inner) * width)[:, None]
    valid = (head < count)[:, None] & (pair < half)[None, :]
    x = tl.load(at + one[None, :], mask=valid, other=0.0).to(tl.float32)
    y = tl.load(at + other[None, :], mask=valid, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(to + one[None, :], (x * cosine - y * sine).to(dtype), mask=valid)
    tl.store(to + other[None, :], (y * cosine + x * sine).to(dtype), mask=valid)
    if COPIES_REST:
        channel = tl.arange(0, WIDTH)
        rest = (channel < start) | ((channel >= start + 2 * half) & (channel < width))
        valid = (head < count)[:, None] & rest[None, :]
        tl.store(to + channel[None, :], tl.load(at + channel[None, :], mask=valid), mask=valid)


@triton.jit
def _join_kernel(  # type: ignore[no-untyped-def]
    packed, part0, part1, part2, part3,
    s0, b0, g0, h0, s1, b1, g1, h1, s2, b2, g2, h2, s3, b3, g3, h3,
    batch, groups, heads, width, size0, size1, size2, size3,
    cos, sin, cos_s, cos_b, sin_s, sin_b, start, half,
    HEADS0: tl.constexpr, HEADS1: tl.constexpr, HEADS2: tl.constexpr, HEADS3: tl.constexpr, WIDTH: tl.constexpr,
    ROTATES: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COPIES_REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    target = packed + token * groups * heads * width
    first = 0
    if HEADS0:
        if ROTATES:  # queries
            _copy_rotated_back(
                target, part0, s, b, s0, b0, g0, h0, first, size0, heads, width, groups * size0,
                cos, sin, cos_s, cos_b, sin_s, sin_b, start, half, HEADS0, WIDTH, HALF, INTERLEAVED, COPIES_REST,
            )  # fmt: skip
        else:
            _copy(target, part0, s, b, s0, b0, g0, h0, first, size0, heads, width, groups * size0, HEADS0, WIDTH)
        first += size0
    if HEADS1:
        _copy(target, part1, s, b, s1, b1, g1, h1, first, size1, heads, width, groups * size1, HEADS1, WIDTH)
        first += size1
    if HEADS2:
        if ROTATES:  # keys
            _copy_rotated_back(
                target, part2, s, b, s2, b2, g2, h2, first, size2, heads, width, groups * size2,
                cos, sin, cos_s, cos_b, sin_s, sin_b, start, half, HEADS2, WIDTH, HALF, INTERLEAVED, COPIES_REST,
            )  # fmt: skip
        else:
            _copy(target, part2, s, b, s2, b2, g2, h2, first, size2, heads, width, groups * size2, HEADS2, WIDTH)
        first += size2
    if HEADS3:
        _copy(target, part3, s, b, s3, b3, g3, h3, first, size3, heads, width, groups * size3, HEADS3, WIDTH)


def split_heads_triton(packed: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Computes `split_heads.split_heads` for at most four parts, with a backward of one kernel."""
    assert len(sizes) <= 4, sizes
    return _SplitHeads.apply(packed, tuple(sizes))


def split_rotated_heads_triton(packed: Tensor, sizes: Sequence[int], rotation: Rotation) -> tuple[Tensor, ...]:
    """Computes `split_heads.split_rotated_heads`, with a backward of one kernel."""
    assert len(sizes) == 4, sizes
    if packed.dtype is torch.float64:
        query, gate, key, value = split_heads_triton(packed, sizes)
        return apply_rope(query, rotation), gate, apply_rope(key, rotation), value
    if packed.requires_grad and torch.is_grad_enabled():
        angles = last_contiguous(rotation.cos), last_contiguous(rotation.sin)
        return _SplitRotatedHeads.apply(packed, tuple(sizes), *angles, rotation.interleaved, rotation.first)
    query, gate, key, value = packed.split(list(sizes), -2)
    return apply_rope_triton(query, rotation), gate, apply_rope_triton(key, rotation), value


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        return packed.split(list(sizes), -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _joined(gradients, ctx.sizes, None), None


class _SplitRotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, sizes: tuple[int, ...], cos: Tensor, sin: Tensor, interleaved: bool, first: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.sizes, ctx.interleaved, ctx.first = sizes, interleaved, first
        query, gate, key, value = packed.split(list(sizes), -2)
        rotated = [rotate_triton(part, cos, sin, interleaved, first, inverse=False) for part in (query, key)]
        return rotated[0], gate, rotated[1], value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        rotation = Rotation(cos, sin, ctx.interleaved, ctx.first)
        return _joined(gradients, ctx.sizes, rotation), None, None, None, None, None


def _joined(gradients: Sequence[Tensor], sizes: tuple[int, ...], rotation: Rotation | None) -> Tensor:
    """Returns the gradient of the packed heads. With a rotation the gradients of queries and keys, the first and the
    third of four parts, are rotated back."""
    parts = [g if g.stride(-1) == 1 or not g.numel() else g.contiguous() for g in gradients]
    s, b, groups, _, width = parts[0].shape
    packed = parts[0].new_empty(s, b, groups, sum(sizes), width)
    if packed.numel():
        missing = 4 - len(parts)
        strides = [stride for part in parts for stride in part.stride()[:4]]
        sizes = (*sizes, *[0] * missing)
        tiles = [next_power_of_2(groups * size) if size else 0 for size in sizes]
        if rotation is None:
            angles: tuple[Any, ...] = (packed, packed, 0, 0, 0, 0, 0, 0)
            half = 1
        else:
            cos, sin, half = rotation.cos, rotation.sin, rotation.cos.shape[-1]
            angles = (cos, sin, *strides_of_angles(cos, sin), rotation.first, half)
        _join_kernel[(s * b,)](
            packed, *parts, *[packed] * missing, *strides, *[0] * 4 * missing,
            b, groups, sum(sizes), width, *sizes, *angles, *tiles, next_power_of_2(width),
            ROTATES=rotation is not None, HALF=next_power_of_2(half),
            INTERLEAVED=rotation is not None and rotation.interleaved, COPIES_REST=2 * half < width,
        )  # fmt: skip
    return packed
