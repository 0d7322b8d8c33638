"""Compares kernels of Mamba-2 layers and gated delta nets with their definitions in float64. Runs in Triton's
interpreter or on a GPU."""

import math
from collections.abc import Callable

import torch
from support.elementwise_kernels import DEVICE, compare, values
from torch import Tensor

from megatron.core.ops import causal_conv_triton as conv_kernels
from megatron.core.ops.causal_conv import causal_conv
from megatron.core.ops.causal_conv_triton import causal_conv_triton
from megatron.core.ops.gated_norm import gated_rms_norm
from megatron.core.ops.gated_norm_triton import gated_rms_norm_triton


def documents(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)


def convolutions() -> None:
    """Rows shorter than the convolution, and longer than a program's tokens; parts of a packed projection; documents;
    fewer taps than the kernel has."""
    f32, bf16, full = torch.float32, torch.bfloat16, conv_kernels._TOKENS
    cases = (
        (2, 2, 1, 24, 4, f32, True, True, None),
        (full + 7, 1, 2, 24, 4, f32, True, True, documents(1, 2, full - 4, 1, 7)),
        (full + 2, 2, 3, 5, 4, bf16, False, True, documents(full - 1, 3)),
        (full + 1, 1, 1, 16, 3, f32, True, False, documents(full, 1)),
        (9, 1, 2, 300, 2, bf16, False, False, None),
        (5, 1, 2, 4, 1, f32, True, True, None),
    )
    for length, batch, groups, width, taps, dtype, has_bias, silu, document in cases:
        packed = values(length, batch, groups, width + 9, dtype=dtype)
        weight = values(groups * width, taps, dtype=dtype, seed=1)
        bias = values(groups * width, dtype=dtype, seed=2) if has_bias else None

        def apply(conv: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def of_part(packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return conv(packed[..., 3 : 3 + width], weight, bias, document, silu)  # noqa: B023

            return of_part

        leaves, what = [packed, weight, bias], (length, batch, groups, width, taps)
        compare(apply(causal_conv), apply(causal_conv_triton), leaves, what, dtype)
    whole, weight = values(9, 2, 6), values(6, 4, seed=1)
    compare(causal_conv, causal_conv_triton, [whole, weight], "channels in one dimension", f32)
    turned = values(9, 6, 2).transpose(1, 2)
    compare(causal_conv, causal_conv_triton, [turned, weight], "strided channels", f32)


def convolutions_of_many_taps() -> None:
    x, weight = values(9, 2, 6), values(6, 5, seed=1)
    assert torch.equal(causal_conv_triton(x, weight), causal_conv(x, weight))


def gated_norms() -> None:
    """Gates inside a packed projection; a weight for all heads or one for each group; both orders."""
    f32, bf16 = torch.float32, torch.bfloat16
    for shape, per_group, inputs_type, dtype in (
        ((5, 2, 3, 40), True, f32, bf16),
        ((7, 1, 2, 3, 16), False, bf16, bf16),
        ((4, 1, 2, 2, 10), True, f32, f32),
        ((1, 1, 1, 3000), False, bf16, f32),
        ((3, 2, 1, 700), True, f32, f32),
    ):
        x, packed = values(*shape, dtype=inputs_type), values(*shape[:3], math.prod(shape[3:]) + 9, dtype=dtype, seed=1)
        weight = values(*(shape[2], shape[-1]) if per_group else shape[-1:], dtype=dtype, seed=2)
        for gate_first in (True, False):
            if per_group and not gate_first:
                continue  # no layer has it

            def apply(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
                def of_part(x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
                    gate = packed[..., 5:-4].unflatten(-1, shape[3:])  # noqa: B023
                    return norm(x, gate, weight, 1e-3, gate_first)  # noqa: B023

                return of_part

            compare(
                apply(gated_rms_norm), apply(gated_rms_norm_triton), [x, packed, weight], (shape, gate_first), dtype
            )
