"""Backward of `split_heads` on a GPU: one kernel copies the gradients of queries, gates, keys and values into the
gradient of the packed projection. The gradients may have any strides."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _put(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    target, source, s, b, stride_s, stride_b, stride_g, stride_h, first, size, heads, width, count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copies one part of a token, `size` heads of each of `count` / `size` groups, to its place in the packed token."""
    head, channel = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    there = (head < count)[:, None] & (channel < width)[None, :]
    group, inner = head // size, head % size
    at = s * stride_s + b * stride_b + (group * stride_g + inner * stride_h)[:, None] + channel[None, :]
    to = ((group * heads + first + inner) * width)[:, None] + channel[None, :]
    tl.store(target + to, tl.load(source + at, mask=there), mask=there)


@triton.jit
def _join_kernel(  # type: ignore[no-untyped-def]
    packed, part0, part1, part2, part3,
    s0, b0, g0, h0, s1, b1, g1, h1, s2, b2, g2, h2, s3, b3, g3, h3,
    batch, groups, heads, width, size0, size1, size2, size3,
    HEADS0: tl.constexpr, HEADS1: tl.constexpr, HEADS2: tl.constexpr, HEADS3: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    target = packed + token * groups * heads * width
    first = 0
    if HEADS0:
        _put(target, part0, s, b, s0, b0, g0, h0, first, size0, heads, width, groups * size0, HEADS0, WIDTH)
        first += size0
    if HEADS1:
        _put(target, part1, s, b, s1, b1, g1, h1, first, size1, heads, width, groups * size1, HEADS1, WIDTH)
        first += size1
    if HEADS2:
        _put(target, part2, s, b, s2, b2, g2, h2, first, size2, heads, width, groups * size2, HEADS2, WIDTH)
        first += size2
    if HEADS3:
        _put(target, part3, s, b, s3, b3, g3, h3, first, size3, heads, width, groups * size3, HEADS3, WIDTH)


def split_heads_triton(packed: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Computes `split_heads.split_heads` for at most four parts, with a backward of one kernel."""
    assert len(sizes) <= 4, sizes
    return _SplitHeads.apply(packed, tuple(sizes))


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        return packed.split(list(sizes), -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = [g if g.stride(-1) == 1 or not g.numel() else g.contiguous() for g in gradients]
        s, b, groups, _, width = parts[0].shape
        packed = parts[0].new_empty(s, b, groups, sum(ctx.sizes), width)
        if packed.numel():
            missing = 4 - len(parts)
            strides = [stride for part in parts for stride in part.stride()[:4]]
            sizes = (*ctx.sizes, *[0] * missing)
            tiles = [triton.next_power_of_2(groups * size) if size else 0 for size in sizes]
            _join_kernel[(s * b,)](
                packed, *parts, *[packed] * missing, *strides, *[0] * 4 * missing,
                b, groups, sum(sizes), width, *sizes, *tiles, triton.next_power_of_2(width),
            )  # fmt: skip
        return packed, None
