"""RMSNorm of each head and rotary positions on a GPU: one kernel in forward and one in backward, which read heads
inside a packed projection. Two operations would write and read the normed heads once more in each direction."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.normed_rope import normed_rope
from megatron.core.ops.rope import Rotation
from megatron.core.ops.rope_triton import last_contiguous, strides_of_angles, strides_of_heads
from megatron.core.ops.split_columns import new_gradient_of
from megatron.core.ops.sum_rows_triton import num_multiprocessors, sum_rows_triton
from megatron.core.ops.tiles import cdiv, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_TILE = 4096
"""Elements of a program's tile."""
_PROGRAMS = 4
"""Programs on each multiprocessor in backward."""


@triton.jit
def _angles(cos, sin, s, b, cos_s, cos_b, sin_s, sin_b, pair, half):  # type: ignore[no-untyped-def]
    """Cosines and sines of a token, float32 [1, HALF]."""
    c = tl.load(cos + s * cos_s + b * cos_b + pair, mask=pair < half, other=0.0).to(tl.float32)
    d = tl.load(sin + s * sin_s + b * sin_b + pair, mask=pair < half, other=0.0).to(tl.float32)
    return c[None, :], d[None, :]


@triton.jit
def _load(base, channel, valid):  # type: ignore[no-untyped-def]
    return tl.load(base + channel[None, :], mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _factor(weight, channel, valid, ZERO_CENTERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weight's factors of some channels, float32 [1, channels]; 0 where not `valid`."""
    factor = tl.load(weight + channel, mask=valid, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        factor = tl.where(valid, factor + 1.0, 0.0)
    return factor[None, :]


@triton.jit
def _normed_rope_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    output, heads, weight, cos, sin, batch, count, per_group, width, half, first, epsilon,
    heads_s, heads_b, heads_g, heads_h, cos_s, cos_b, sin_s, sin_b,
    INTERLEAVED: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_REST: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair, channel = tl.arange(0, HALF), tl.arange(0, WIDTH)
    one = first + (2 * pair if INTERLEAVED else pair)
    other = first + (2 * pair + 1 if INTERLEAVED else half + pair)
    rest = (channel < first) | ((channel >= first + 2 * half) & (channel < width))
    there = (head < count)[:, None]
    valid, valid_rest = there & (pair < half)[None, :], there & rest[None, :]
    source = heads + s * heads_s + b * heads_b + (head // per_group * heads_g + head % per_group * heads_h)[:, None]
    target = output + (token * count + head[:, None]) * width
    dtype = output.dtype.element_ty
    x, y = _load(source, one, valid), _load(source, other, valid)
    squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
    z = tl.zeros((HEADS, WIDTH), tl.float32)
    if HAS_REST:
        z = _load(source, channel, valid_rest)
        squares += tl.sum(z * z, 1)
    inverse = (1.0 / tl.sqrt(squares / width + epsilon))[:, None]
    x *= inverse * _factor(weight, one, pair < half, ZERO_CENTERED)
    y *= inverse * _factor(weight, other, pair < half, ZERO_CENTERED)
    c, d = _angles(cos, sin, s, b, cos_s, cos_b, sin_s, sin_b, pair, half)
    tl.store(target + one[None, :], (x * c - y * d).to(dtype), mask=valid)
    tl.store(target + other[None, :], (y * c + x * d).to(dtype), mask=valid)
    if HAS_REST:
        z *= inverse * _factor(weight, channel, rest, ZERO_CENTERED)
        tl.store(target + channel[None, :], z.to(dtype), mask=valid_rest)


@triton.jit
def _normed_rope_backward_kernel(  # type: ignore[no-untyped-def]
    heads_gradient, weight_parts, gradient, heads, weight, cos, sin,
    tokens, batch, count, per_group, width, half, first, epsilon,
    target_s, target_b, target_g, target_h, gradient_s, gradient_b, gradient_g, gradient_h,
    heads_s, heads_b, heads_g, heads_h, cos_s, cos_b, sin_s, sin_b,
    INTERLEAVED: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_REST: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair, channel = tl.arange(0, HALF), tl.arange(0, WIDTH)
    one = first + (2 * pair if INTERLEAVED else pair)
    other = first + (2 * pair + 1 if INTERLEAVED else half + pair)
    rest = (channel < first) | ((channel >= first + 2 * half) & (channel < width))
    there = (head < count)[:, None]
    valid, valid_rest = there & (pair < half)[None, :], there & rest[None, :]
    group, inner = head // per_group, head % per_group
    dtype = heads_gradient.dtype.element_ty
    one_factor = _factor(weight, one, pair < half, ZERO_CENTERED)
    other_factor = _factor(weight, other, pair < half, ZERO_CENTERED)
    rest_factor = _factor(weight, channel, rest, ZERO_CENTERED)
    one_part = tl.zeros((HEADS, HALF), tl.float32)
    other_part = tl.zeros((HEADS, HALF), tl.float32)
    rest_part = tl.zeros((HEADS, WIDTH), tl.float32)
    token = tl.program_id(0).to(tl.int64)
    while token < tokens:
        s, b = token // batch, token % batch
        source = heads + s * heads_s + b * heads_b + (group * heads_g + inner * heads_h)[:, None]
        given = gradient + s * gradient_s + b * gradient_b + (group * gradient_g + inner * gradient_h)[:, None]
        target = heads_gradient + s * target_s + b * target_b + (group * target_g + inner * target_h)[:, None]
        x, y = _load(source, one, valid), _load(source, other, valid)
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        z = tl.zeros((HEADS, WIDTH), tl.float32)
        dz = tl.zeros((HEADS, WIDTH), tl.float32)
        if HAS_REST:
            z, dz = _load(source, channel, valid_rest), _load(given, channel, valid_rest)
            squares += tl.sum(z * z, 1)
        inverse = (1.0 / tl.sqrt(squares / width + epsilon))[:, None]
        x, y, z = x * inverse, y * inverse, z * inverse
        c, d = _angles(cos, sin, s, b, cos_s, cos_b, sin_s, sin_b, pair, half)
        g, h = _load(given, one, valid), _load(given, other, valid)
        dx, dy = g * c + h * d, h * c - g * d  # the gradient of the normed heads
        one_part += dx * x
        other_part += dy * y
        dx, dy = dx * one_factor, dy * other_factor
        projection = tl.sum(dx * x, 1) + tl.sum(dy * y, 1)
        if HAS_REST:
            rest_part += dz * z
            dz *= rest_factor
            projection += tl.sum(dz * z, 1)
        projection = (projection / width)[:, None]
        tl.store(target + one[None, :], ((dx - x * projection) * inverse).to(dtype), mask=valid)
        tl.store(target + other[None, :], ((dy - y * projection) * inverse).to(dtype), mask=valid)
        if HAS_REST:
            tl.store(target + channel[None, :], ((dz - z * projection) * inverse).to(dtype), mask=valid_rest)
        token += tl.num_programs(0)
    part = weight_parts + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * width
    tl.store(part + one, tl.sum(one_part, 0), mask=pair < half)
    tl.store(part + other, tl.sum(other_part, 0), mask=pair < half)
    if HAS_REST:
        tl.store(part + channel, tl.sum(rest_part, 0), mask=rest)


def normed_rope_triton(
    heads: Tensor, weight: Tensor, epsilon: float, zero_centered: bool, rotation: Rotation
) -> Tensor:
    """Computes `normed_rope.normed_rope` in one kernel, in float32 with one rounding. Float64 uses the definition."""
    if torch.float64 in (heads.dtype, weight.dtype) or not heads.numel():
        return normed_rope(heads, weight, epsilon, zero_centered, rotation)
    angles = last_contiguous(rotation.cos), last_contiguous(rotation.sin)
    return _NormedRope.apply(heads, weight, *angles, epsilon, zero_centered, rotation.interleaved, rotation.first)


class _NormedRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        heads: Tensor,
        weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        epsilon: float,
        zero_centered: bool,
        interleaved: bool,
        first: int,
    ) -> Tensor:
        ctx.new_gradient = new_gradient_of(heads)
        heads = heads if heads.stride(-1) == 1 else heads.contiguous()
        ctx.save_for_backward(heads, cos, sin)
        # Keeps the parameter instead of a saved tensor; `ops.linear._Linear` says why.
        ctx.weight, ctx.epsilon, ctx.zero_centered = weight, epsilon, zero_centered
        ctx.interleaved, ctx.first = interleaved, first
        s, b, *counts, _ = heads.shape
        output = torch.empty(heads.shape, dtype=weight.dtype, device=heads.device)
        sizes, tile = _sizes(heads, cos, first), _tile(heads, cos, interleaved, zero_centered)
        _normed_rope_kernel[(s * b, cdiv(math.prod(counts), tile["HEADS"]))](
            output,
            heads,
            weight,
            cos,
            sin,
            b,
            *sizes,
            epsilon,
            *strides_of_heads(heads),
            *strides_of_angles(cos, sin),
            **tile,
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        heads, cos, sin = ctx.saved_tensors
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        s, b, *counts, width = heads.shape
        heads_gradient = ctx.new_gradient()
        sizes, tile = _sizes(heads, cos, ctx.first), _tile(heads, cos, ctx.interleaved, ctx.zero_centered)
        blocks = cdiv(math.prod(counts), tile["HEADS"])
        programs = max(1, min(s * b, _PROGRAMS * num_multiprocessors(heads.device) // blocks))
        parts = torch.empty(programs * blocks, width, dtype=torch.float32, device=heads.device)
        _normed_rope_backward_kernel[(programs, blocks)](
            heads_gradient, parts, gradient, heads, ctx.weight, cos, sin, s * b, b, *sizes, ctx.epsilon,
            *strides_of_heads(heads_gradient), *strides_of_heads(gradient), *strides_of_heads(heads),
            *strides_of_angles(cos, sin), **tile,
        )  # fmt: skip
        weight_gradient = sum_rows_triton(parts, ctx.weight.dtype) if ctx.needs_input_grad[1] else None
        return heads_gradient, weight_gradient, None, None, None, None, None, None


def _sizes(heads: Tensor, cos: Tensor, first: int) -> tuple[int, ...]:
    """Returns the number of heads, of heads in a group, of channels, and of pairs, and the first rotated channel."""
    counts = heads.shape[2:-1]
    return math.prod(counts), counts[-1], heads.shape[-1], cos.shape[-1], first


def _tile(heads: Tensor, cos: Tensor, interleaved: bool, zero_centered: bool) -> dict[str, Any]:
    width, half = heads.shape[-1], cos.shape[-1]
    count, widest = next_power_of_2(math.prod(heads.shape[2:-1])), next_power_of_2(width)
    return {
        "INTERLEAVED": interleaved,
        "ZERO_CENTERED": zero_centered,
        "HAS_REST": 2 * half < width,
        "HEADS": max(1, min(count, _TILE // widest)),
        "HALF": next_power_of_2(half),
        "WIDTH": widest,
    }
