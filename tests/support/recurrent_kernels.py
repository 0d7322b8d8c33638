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
from megatron.core.ops.split_columns import split_columns
from megatron.core.ops.ssd import scan_triton
from megatron.core.ops.ssd.scan import mamba_scan


def documents(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)


def convolutions() -> None:
    """Rows shorter than the convolution, and longer than a program's tokens; parts of a packed projection; documents;
    fewer taps than the kernel has."""
    f32, bf16, full = torch.float32, torch.bfloat16, conv_kernels._TOKENS
    cases = (
        (2, 2, 1, 24, 4, f32, True, True, None),
        (full + 7, 1, 2, 24, 4, f32, True, True, documents(1, 2, full - 4, 1, 7)),
        (full + 2, 1, 3, 5, 4, bf16, False, True, documents(full - 1, 3)),
        (full + 1, 1, 1, 16, 3, f32, True, False, documents(full, 1)),
        (9, 1, 1, 300, 2, bf16, False, False, None),
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


def projections() -> None:
    """A convolution and a gated norm that read parts of one projection: their kernels write into the packed gradient.
    The gradient of a part that plain torch reads is copied."""
    for dtype, heads, width in ((torch.float32, 2, 8), (torch.bfloat16, 3, 5)):
        packed = values(7, 2, 2, 24 + heads * width + 3, dtype=dtype)
        weight, taps = values(width, dtype=dtype, seed=1), values(48, 4, dtype=dtype, seed=2)
        inputs = values(7, 2, 2, heads, width, dtype=dtype, seed=3)
        written: dict[str, int] = {}
        """The strides of rows of the gradients of parts."""

        def apply(conv: Callable[..., Tensor], norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def of_parts(packed: Tensor, weight: Tensor, filters: Tensor) -> Tensor:
                parts = split_columns(packed, (24, heads * width, 3))  # noqa: B023
                for name, part in zip(("mixed", "gate", "step"), parts, strict=True):
                    part.register_hook(lambda gradient, name=name: written.update({name: gradient.stride()[1]}))  # noqa: B023
                mixed, gate, step = parts
                gate = gate.unflatten(-1, (heads, width))  # noqa: B023
                normed = norm(inputs.to(gate.dtype), gate, weight, 1e-3, False).flatten(3)  # noqa: B023
                convolved = conv(mixed, filters, silu=True)
                return torch.cat((convolved, normed, step * step), -1)

            return of_parts

        functions = apply(causal_conv, gated_rms_norm), apply(causal_conv_triton, gated_rms_norm_triton)
        compare(*functions, [packed, weight, taps], ("projection", heads, width), dtype)
        assert written["mixed"] == written["gate"] == packed.stride(1) != written["step"]


def scan_arguments(
    length: int, batch: int, groups: int, per_group: int, head_dim: int, state_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Returns x, B and C of groups, dt, dt_bias, A_log and D."""
    heads = groups * per_group
    mixed = values(length, batch, groups, per_group * head_dim + 2 * state_dim, dtype=dtype)
    step = values(length, batch, groups, per_group + 3, dtype=dtype, seed=1)
    vectors = [values(heads, dtype=dtype, seed=seed) for seed in (2, 3, 4)]
    return [mixed, step, *vectors]


def scans() -> None:
    """Float32, so that nothing is hidden by rounding: rows that end within a chunk; documents within, across and as
    long as chunks; heads and states that do not fill a tile, and heads of two tiles; gradients that are strided."""
    chunk = scan_triton._CHUNK
    cases = (
        (chunk + 5, 2, 2, 2, 8, 4, 0.0, None),
        (3 * chunk, 1, 1, 2, 20, 20, 0.7, documents(3, 1, chunk - 4, chunk, chunk - 1, 1)),
        (chunk + 1, 1, 1, 1, 80, 16, 0.0, documents(chunk + 1)),
        (5, 1, 3, 1, 16, 32, 0.0, documents(2, 3)),
    )
    for length, batch, groups, per_group, head_dim, state_dim, least, document in cases:
        leaves = scan_arguments(length, batch, groups, per_group, head_dim, state_dim, torch.float32)

        def definition(mixed: Tensor, step: Tensor, *vectors: Tensor) -> Tensor:
            sizes = {"head_dim": head_dim, "state_dim": state_dim, "min_step": least}  # noqa: B023
            return mamba_scan(mixed, step[..., 2:-1], *vectors, document, **sizes).flip(2)  # noqa: B023

        def kernels(mixed: Tensor, step: Tensor, *vectors: Tensor) -> Tensor:
            sizes = head_dim, state_dim, least  # noqa: B023
            return scan_triton.scan_in_kernels(mixed, step[..., 2:-1], *vectors, document, *sizes).flip(2)  # noqa: B023

        compare(definition, kernels, leaves, (length, groups, head_dim, state_dim), torch.float32, units=20.0)


def rounded_scans() -> None:
    """Bfloat16, at the sizes of published models: errors are not much larger than those of the definition, which
    computes in float32 and rounds its results. Strong and weak decays; several documents. Triton's interpreter
    truncates to bfloat16, so this runs on GPUs only."""
    for length, groups, per_group, head_dim, state_dim, fade, document in (
        (300, 2, 8, 64, 128, 0.0, None),
        (257, 1, 8, 64, 256, 3.0, documents(100, 157)),
        (129, 1, 8, 128, 64, -4.0, None),
    ):
        leaves = scan_arguments(length, 1, groups, per_group, head_dim, state_dim, torch.bfloat16)
        leaves[2] = leaves[2] + fade
        weights = values(length, 1, groups, per_group * head_dim, dtype=torch.bfloat16, seed=5)
        found = []
        for scan, wide in ((mamba_scan, True), (mamba_scan, False), (scan_triton.mamba_scan_triton, False)):
            given = [(leaf.double() if wide else leaf).detach().requires_grad_() for leaf in leaves]
            parts = given[0], given[1][..., 2:-1], *given[2:], document
            y = scan(*parts, head_dim=head_dim, state_dim=state_dim)
            gradients = torch.autograd.grad(y, given, weights.to(y.dtype))
            found.append([tensor.double() for tensor in (y if wide else y.bfloat16(), *gradients)])
        for number, (exact, plain, ours) in enumerate(zip(*found, strict=True)):
            own, other = ((tensor - exact).norm() / exact.norm() for tensor in (ours, plain))
            assert own <= 1.5 * other + 1e-3, (length, state_dim, NAMES[number], float(own), float(other))


NAMES = "y", "x, B, C", "dt", "dt_bias", "A_log", "D"


def scans_of_other_types() -> None:
    """Types whose products would lose digits use the definition."""
    for dtype in (torch.float32, torch.float64, torch.float16):
        mixed, step, *vectors = scan_arguments(9, 1, 1, 2, 4, 4, dtype)
        given = mixed, step[..., 2:-1], *vectors
        found, plain = (scan(*given, head_dim=4, state_dim=4) for scan in (scan_triton.mamba_scan_triton, mamba_scan))
        assert torch.equal(found, plain)
