"""The causal convolution with its activation on a GPU: one kernel in forward and one in backward, which read channels
inside a packed projection.

A program walks along some tokens of a row with the last and the next ones in registers, so each is read once and early.
Backward computes the convolution again and keeps nothing but the inputs. It sums its tokens' part of the gradients of
weight and bias in registers; a second kernel sums these parts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.causal_conv import causal_conv
from megatron.core.ops.split_columns import new_gradient_of
from megatron.core.ops.sum_rows_triton import sum_rows_triton
from megatron.core.ops.tiles import cdiv, common_alignment, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext
from megatron.core.utils.warn import warn_on_first_rank

_TAPS = 4
"""Taps that the kernels have; fewer are filled up with weights of zero."""
_CHANNELS = 256
"""Most channels of a program."""
_TOKENS = 64
"""Tokens of a program. The three before and after them are read twice."""


@triton.jit
def aligned(stride, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """Returns the stride, which ALIGNED divides, such that the compiler knows it."""
    return stride // ALIGNED * ALIGNED


@triton.jit
def _channels_of(inputs, step, first, length, stride, channel, width):  # type: ignore[no-untyped-def]
    """The channels of the token `step` tokens after the first one, in float32; zeros outside of the row."""
    valid = channel < tl.where((step >= -first) & (step < length - first), width, 0)
    return tl.load(inputs + step * stride + channel, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _document_of(documents, token, length):  # type: ignore[no-untyped-def]
    """The number of a token's document; -1 outside of the row."""
    return tl.load(documents + token, mask=(token >= 0) & (token < length), other=-1)


@triton.jit
def _convolved(x0, x1, x2, x3, d0, d1, d2, d3, w0, w1, w2, w3, b, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The convolution of a token 0 with the tokens 1, 2 and 3 before it; w0 is the weight of the token itself."""
    if PACKED:
        x1, x2, x3 = tl.where(d1 == d0, x1, 0.0), tl.where(d2 == d0, x2, 0.0), tl.where(d3 == d0, x3, 0.0)
    return b + w3 * x3 + w2 * x2 + w1 * x1 + w0 * x0, x1, x2, x3


@triton.jit
def _weights(weight, channel, inside, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights of the token itself and of those 1, 2 and 3 before it, in float32."""
    w0 = tl.load(weight + channel * K + K - 1, mask=inside, other=0.0).to(tl.float32)
    w1, w2, w3 = tl.zeros_like(w0), tl.zeros_like(w0), tl.zeros_like(w0)
    if K > 1:
        w1 = tl.load(weight + channel * K + K - 2, mask=inside, other=0.0).to(tl.float32)
    if K > 2:
        w2 = tl.load(weight + channel * K + K - 3, mask=inside, other=0.0).to(tl.float32)
    if K > 3:
        w3 = tl.load(weight + channel * K + K - 4, mask=inside, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _causal_conv_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    output, inputs, weight, bias, documents, length, batch, groups, width, inputs_s, inputs_b, inputs_g,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, CHANNELS)
    group, row = tl.program_id(0) // blocks, tl.program_id(2)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < width
    w0, w1, w2, w3 = _weights(weight, group * width + channel, inside, K)
    b = tl.zeros_like(w0)
    if HAS_BIAS:
        b = tl.load(bias + group * width + channel, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(1) * TOKENS
    far = first.to(tl.int64)
    source = inputs + far * inputs_s + row.to(tl.int64) * inputs_b + group.to(tl.int64) * aligned(inputs_g, ALIGNED)
    output_s = batch * groups * width
    target = output + far * output_s + (row * groups + group) * width + channel
    x3 = _channels_of(source, -3, first, length, inputs_s, channel, width)
    x2 = _channels_of(source, -2, first, length, inputs_s, channel, width)
    x1 = _channels_of(source, -1, first, length, inputs_s, channel, width)
    d0, d1, d2, d3 = 0, 0, 0, 0
    if PACKED:
        d1, d2 = _document_of(documents, first - 1, length), _document_of(documents, first - 2, length)
        d0, d3 = d1, _document_of(documents, first - 3, length)
    x0 = _channels_of(source, 0, first, length, inputs_s, channel, width)
    e1 = _channels_of(source, 1, first, length, inputs_s, channel, width)
    e2 = _channels_of(source, 2, first, length, inputs_s, channel, width)
    for step in tl.range(0, TOKENS, loop_unroll_factor=UNROLL):
        e3 = _channels_of(source, step + 3, first, length, inputs_s, channel, width)
        if PACKED:
            d0 = _document_of(documents, first + step, length)
        y, x1, x2, x3 = _convolved(x0, x1, x2, x3, d0, d1, d2, d3, w0, w1, w2, w3, b, PACKED)
        if SILU:
            y *= tl.sigmoid(y)
        valid = channel < tl.where(step < length - first, width, 0)
        tl.store(target + step * output_s, y.to(output.dtype.element_ty), mask=valid)
        x3, x2, x1, x0, e1, e2 = x2, x1, x0, e1, e2, e3
        if PACKED:
            d3, d2, d1 = d2, d1, d0


@triton.jit
def _causal_conv_backward_kernel(  # type: ignore[no-untyped-def]
    inputs_gradient, weight_parts, gradient, inputs, weight, bias, documents, length, batch, groups, width,
    target_s, target_b, target_g, gradient_s, gradient_b, gradient_g, inputs_s, inputs_b, inputs_g,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    # Each token adds to the gradients of itself and of the three before it. p1, p2 and p3 are what theirs have so far.
    blocks = tl.cdiv(width, CHANNELS)
    group, row = tl.program_id(0) // blocks, tl.program_id(2)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < width
    w0, w1, w2, w3 = _weights(weight, group * width + channel, inside, K)
    b = tl.zeros_like(w0)
    if HAS_BIAS:
        b = tl.load(bias + group * width + channel, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(1) * TOKENS
    far = first.to(tl.int64)
    source = inputs + far * inputs_s + row.to(tl.int64) * inputs_b + group.to(tl.int64) * aligned(inputs_g, ALIGNED)
    given = (
        gradient + far * gradient_s + row.to(tl.int64) * gradient_b + group.to(tl.int64) * aligned(gradient_g, ALIGNED)
    )
    target = inputs_gradient + far * target_s + row.to(tl.int64) * target_b
    target += group.to(tl.int64) * aligned(target_g, ALIGNED) + channel
    x3 = _channels_of(source, -3, first, length, inputs_s, channel, width)
    x2 = _channels_of(source, -2, first, length, inputs_s, channel, width)
    x1 = _channels_of(source, -1, first, length, inputs_s, channel, width)
    d0, d1, d2, d3 = 0, 0, 0, 0
    if PACKED:
        d1, d2 = _document_of(documents, first - 1, length), _document_of(documents, first - 2, length)
        d0, d3 = d1, _document_of(documents, first - 3, length)
    p1, p2, p3 = tl.zeros_like(x1), tl.zeros_like(x1), tl.zeros_like(x1)
    g0, g1, g2, g3, gb = tl.zeros_like(x1), tl.zeros_like(x1), tl.zeros_like(x1), tl.zeros_like(x1), tl.zeros_like(x1)
    x0 = _channels_of(source, 0, first, length, inputs_s, channel, width)
    e1 = _channels_of(source, 1, first, length, inputs_s, channel, width)
    e2 = _channels_of(source, 2, first, length, inputs_s, channel, width)
    dy0 = _channels_of(given, 0, first, length, gradient_s, channel, width)
    dy1 = _channels_of(given, 1, first, length, gradient_s, channel, width)
    dy2 = _channels_of(given, 2, first, length, gradient_s, channel, width)
    for step in tl.range(0, TOKENS + 3, loop_unroll_factor=UNROLL):
        e3 = _channels_of(source, step + 3, first, length, inputs_s, channel, width)
        dy3 = _channels_of(given, step + 3, first, length, gradient_s, channel, width)
        dy = dy0
        if PACKED:
            d0 = _document_of(documents, first + step, length)
        y, z1, z2, z3 = _convolved(x0, x1, x2, x3, d0, d1, d2, d3, w0, w1, w2, w3, b, PACKED)
        if SILU:
            s = tl.sigmoid(y)
            dy *= s * (1.0 + y * (1.0 - s))
        if PACKED:
            p1 += tl.where(d1 == d0, w1 * dy, 0.0)
            p2 += tl.where(d2 == d0, w2 * dy, 0.0)
            p3 += tl.where(d3 == d0, w3 * dy, 0.0)
        else:
            p1 += w1 * dy
            p2 += w2 * dy
            p3 += w3 * dy
        own = tl.where(step < TOKENS, dy, 0.0)
        g0 += own * x0
        g1 += own * z1
        g2 += own * z2
        g3 += own * z3
        gb += own
        valid = channel < tl.where((step >= 3) & (step - 3 < length - first), width, 0)
        tl.store(target + (step - 3) * target_s, p3.to(inputs_gradient.dtype.element_ty), mask=valid)
        p3, p2, p1, dy0, dy1, dy2 = p2, p1, w0 * dy, dy1, dy2, dy3
        x3, x2, x1, x0, e1, e2 = x2, x1, x0, e1, e2, e3
        if PACKED:
            d3, d2, d1 = d2, d1, d0
    part = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * groups + group
    at = weight_parts + (part * width + channel) * (K + HAS_BIAS)
    tl.store(at + K - 1, g0, mask=inside)
    if K > 1:
        tl.store(at + K - 2, g1, mask=inside)
    if K > 2:
        tl.store(at + K - 3, g2, mask=inside)
    if K > 3:
        tl.store(at + K - 4, g3, mask=inside)
    if HAS_BIAS:
        tl.store(at + K, gb, mask=inside)


def causal_conv_triton(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, document: Tensor | None = None, silu: bool = False
) -> Tensor:
    """Computes `causal_conv.causal_conv` in one kernel, with one rounding. Inputs [s, b, c] or [s, b, g, c / g], whose
    last dimension is contiguous, are read as they lie. Float64 and convolutions with more than four taps use the
    reference."""
    if weight.shape[1] > _TAPS:
        warn_on_first_rank(
            f"causal convolution: its kernel has {_TAPS} taps at most, so plain torch computes that of "
            f"{weight.shape[1]}, which is slower"
        )
    if weight.shape[1] > _TAPS or torch.float64 in (inputs.dtype, weight.dtype) or not inputs.numel():
        return causal_conv(inputs, weight, bias, document, silu)
    return _CausalConv.apply(inputs, weight, bias, document, silu)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, inputs: Tensor, weight: Tensor, bias: Tensor | None, document: Tensor | None, silu: bool
    ) -> Tensor:
        ctx.save_for_backward(inputs, document)
        # Keeps the parameters instead of saved tensors; `ops.linear._Linear` says why.
        ctx.weight, ctx.bias, ctx.silu, ctx.packed = weight, bias, silu, document is not None
        ctx.new_gradient = new_gradient_of(inputs)
        output = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        x = _in_groups(inputs)
        _causal_conv_kernel[_grid(x)](
            output, x, weight.detach().contiguous(), bias, document, *_sizes(x), *x.stride()[:3], **_settings(ctx, x, x)
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, document), weight = ctx.saved_tensors, ctx.weight.detach().contiguous()
        inputs_gradient = ctx.new_gradient()
        x, dy, dx = _in_groups(inputs), _in_groups(output_gradient), _in_groups(inputs_gradient)
        taps, grid, has_bias = weight.shape[1], _grid(x), ctx.bias is not None
        parts = torch.empty(grid[1] * grid[2], weight.shape[0], taps + has_bias, dtype=torch.float32, device=x.device)
        _causal_conv_backward_kernel[grid](
            dx, parts, dy, x, weight, ctx.bias, document, *_sizes(x),
            *dx.stride()[:3], *dy.stride()[:3], *x.stride()[:3], **_settings(ctx, x, dx, x, dy),
        )  # fmt: skip
        sums = sum_rows_triton(parts.flatten(1), weight.dtype).view(weight.shape[0], -1)
        return inputs_gradient, sums[:, :taps], sums[:, taps] if has_bias else None, None, None


def _in_groups(inputs: Tensor) -> Tensor:
    """Returns [s, b, g, channels of a group] whose last dimension is contiguous: a view, if the inputs allow it."""
    if inputs.dim() != 4:
        inputs = inputs.flatten(2)[:, :, None]
    return inputs if inputs.stride(3) == 1 else inputs.contiguous()


def _grid(x: Tensor) -> tuple[int, int, int]:
    length, batch, groups, width = x.shape
    return groups * cdiv(width, _channels(width)), cdiv(length, _TOKENS), batch


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    length, batch, groups, width = x.shape
    return length, batch, groups, width


def _channels(width: int) -> int:
    return min(_CHANNELS, next_power_of_2(width))


def _settings(ctx: AutogradContext, x: Tensor, *strided: Tensor) -> dict[str, Any]:
    return {
        "K": ctx.weight.shape[1],
        "HAS_BIAS": ctx.bias is not None,
        "PACKED": ctx.packed,
        "SILU": ctx.silu,
        "TOKENS": _TOKENS,
        "CHANNELS": _channels(x.shape[3]),
        "UNROLL": 4,
        "ALIGNED": common_alignment(*(tensor.stride(2) for tensor in strided)),
        "num_warps": 4,
    }
