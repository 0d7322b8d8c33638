"""Bias, activation, gate and router weight in one GPU kernel each for forward and backward.

Backward keeps only the product, recomputes the intermediate results in float32, and sums the bias's gradient while it
writes the product's.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.activation import Activation, gelu_erf, gelu_tanh, quick_gelu, squared_relu, weighted_activation
from megatron.core.ops.fp8.quantize import note_largest
from megatron.core.ops.fp8.quantize_triton import bits_of_size, raise_largest
from megatron.core.ops.sum_rows_triton import num_multiprocessors, sum_rows_triton
from megatron.core.ops.tiles import cdiv, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_KINDS = {F.silu: 0, gelu_tanh: 1, gelu_erf: 2, F.gelu: 2, quick_gelu: 3, squared_relu: 4, F.relu: 5}
_BLOCK = 1024
"""Channels that one program computes."""
_ROWS, _COLUMNS = 16, 256
"""Rows and channels of one program of the backward that also sums a bias's gradient."""
_PROGRAMS = 8
"""Such programs for each multiprocessor."""
_NANS = tl.constexpr(tl.PropagateNan.ALL)
"""Propagates NaN like torch.maximum, so that a NaN reaches the loss and is noticed."""


@triton.jit
def _activate(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """Returns f(x) and f'(x)."""
    if KIND == 0:  # x sigmoid(x)
        s = tl.sigmoid(x)
        value, slope = x * s, s * (1.0 + x * (1.0 - s))
    elif KIND == 1:  # (1 + tanh(u)) / 2 = sigmoid(2 u) = s, u = sqrt(2 / pi) (x + 0.044715 x^3)
        s = tl.sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * x * x))
        value = x * s
        slope = s * (1.0 + (1.0 - s) * x * (1.5957691216057308 + 0.21406444881780076 * x * x))
    elif KIND == 2:
        phi = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value, slope = x * phi, phi + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 3:
        s = tl.sigmoid(1.702 * x)
        value, slope = x * s, s * (1.0 + 1.702 * x * (1.0 - s))
    elif KIND == 4:
        r = tl.maximum(x, 0.0, _NANS)
        value, slope = r * r, 2.0 * r
    else:
        value, slope = tl.maximum(x, 0.0, _NANS), tl.where(x > 0.0, 1.0, 0.0)
    return value, slope


@triton.jit
def _differentiate(  # type: ignore[no-untyped-def]
    gate, up, clamp, up_offset, KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr
):
    """Returns the activation and its derivatives by gate and by up; without a gate the first is by the product."""
    value, slope = _activate(tl.minimum(gate, clamp, _NANS) if CLAMPED else gate, KIND)
    up_slope = value
    if GATED:
        factor = (tl.minimum(tl.maximum(up, -clamp, _NANS), clamp, _NANS) if CLAMPED else up) + up_offset
        value, slope = value * factor, slope * factor
    if CLAMPED:
        slope = tl.where(gate <= clamp, slope, 0.0)
        up_slope = tl.where((up >= -clamp) & (up <= clamp), up_slope, 0.0)
    return value, slope, up_slope


@triton.jit
def _activation_forward_kernel(  # type: ignore[no-untyped-def]
    output, largest, product, bias, weights, ffn, clamp, up_offset,
    KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, BIASED: tl.constexpr, WEIGHTED: tl.constexpr,
    NOTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if NOTES == 2:
        largest += row
    if NOTES:
        before = tl.load(largest)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < ffn
    at = product + row * ffn * (2 if GATED else 1) + channel
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        gate += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(at + ffn, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            up += tl.load(bias + ffn + channel, mask=inside, other=0.0).to(tl.float32)
    value, _, _ = _differentiate(gate, up, clamp, up_offset, KIND, GATED, CLAMPED)
    if WEIGHTED:
        value *= tl.load(weights + row).to(tl.float32)
    rounded = value.to(output.dtype.element_ty)
    tl.store(output + row * ffn + channel, rounded, mask=inside)
    if NOTES:
        raise_largest(largest, before, tl.where(inside, bits_of_size(rounded.to(tl.float32)), 0))


@triton.jit
def _activation_backward_kernel(  # type: ignore[no-untyped-def]
    product_gradient, largest, weights_gradient, gradient, product, weights, ffn, clamp, up_offset,
    KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr, NOTES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if NOTES == 2:
        largest += row
    if NOTES:
        before = tl.load(largest)
    size = tl.zeros((BLOCK,), tl.int32)
    weight = tl.load(weights + row).to(tl.float32) if WEIGHTED else 1.0
    start = row * ffn * (2 if GATED else 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, ffn, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        inside = channel < ffn
        gate = tl.load(product + start + channel, mask=inside, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(product + start + ffn + channel, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(gradient + row * ffn + channel, mask=inside, other=0.0).to(tl.float32)
        value, slope, up_slope = _differentiate(gate, up, clamp, up_offset, KIND, GATED, CLAMPED)
        total += dy * value
        dy *= weight
        at = product_gradient + start + channel
        rounded = (dy * slope).to(product_gradient.dtype.element_ty)
        tl.store(at, rounded, mask=inside)
        if NOTES:
            size = tl.maximum(size, tl.where(inside, bits_of_size(rounded.to(tl.float32)), 0))
        if GATED:
            rounded = (dy * up_slope).to(product_gradient.dtype.element_ty)
            tl.store(at + ffn, rounded, mask=inside)
            if NOTES:
                size = tl.maximum(size, tl.where(inside, bits_of_size(rounded.to(tl.float32)), 0))
    if NOTES:
        raise_largest(largest, before, size)
    if WEIGHTED:
        tl.store(weights_gradient + row, tl.sum(total).to(weights_gradient.dtype.element_ty))


@triton.jit
def _biased_activation_backward_kernel(  # type: ignore[no-untyped-def]
    product_gradient, bias_parts, gradient, product, bias, rows, ffn, rows_per_program, clamp, up_offset,
    KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < ffn
    width = ffn * (2 if GATED else 1)
    gate_bias = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    up_bias = gate_bias
    if GATED:
        up_bias = tl.load(bias + ffn + channel, mask=inside, other=0.0).to(tl.float32)
    gate_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    part = tl.program_id(1)
    end = tl.minimum((part + 1) * rows_per_program, rows)
    for first in range(part * rows_per_program, end, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        valid = (row < end) & inside[None, :]
        at = row * width + channel[None, :]
        gate = tl.load(product + at, mask=valid, other=0.0).to(tl.float32) + gate_bias[None, :]
        up = gate
        if GATED:
            up = tl.load(product + at + ffn, mask=valid, other=0.0).to(tl.float32) + up_bias[None, :]
        dy = tl.load(gradient + row * ffn + channel[None, :], mask=valid, other=0.0).to(tl.float32)
        _, slope, up_slope = _differentiate(gate, up, clamp, up_offset, KIND, GATED, CLAMPED)
        gate_total += dy * slope
        tl.store(product_gradient + at, (dy * slope).to(product_gradient.dtype.element_ty), mask=valid)
        if GATED:
            up_total += dy * up_slope
            tl.store(product_gradient + at + ffn, (dy * up_slope).to(product_gradient.dtype.element_ty), mask=valid)
    at = bias_parts + part * width + channel
    tl.store(at, tl.sum(gate_total, 0), mask=inside)
    if GATED:
        tl.store(at + ffn, tl.sum(up_total, 0), mask=inside)


def weighted_activation_triton(
    product: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: Activation,
    notes_largest: bool = False,
) -> Tensor:
    """Computes `weighted_activation` in one kernel. Float64 and other activations use the reference. `notes_largest`:
    without a bias the largest values of the result and of the product's gradient are noted for fp8: with `weights`
    those of each row, because the rows of different experts have different scales."""
    if not _has_kernel(product, weights, activation):
        return weighted_activation(product, bias, weights, activation)
    if bias is not None and (weights is not None or bias.dim() > 1):
        product, bias = product + bias, None
    if bias is not None:
        return _BiasedActivation.apply(product, bias, activation)
    return _WeightedActivation.apply(product, weights, activation, notes_largest)


def _has_kernel(product: Tensor, weights: Tensor | None, activation: Activation) -> bool:
    exact = torch.float64 in (product.dtype, None if weights is None else weights.dtype)
    return not exact and isinstance(activation, Activation) and activation.function in _KINDS


def keeps_only_arguments(product: Tensor, bias: Tensor | None, weights: Tensor | None, activation: Activation) -> bool:
    """Returns whether backward of `weighted_activation_triton` needs nothing but these arguments."""
    adds_bias = bias is not None and (weights is not None or bias.dim() > 1)
    return _has_kernel(product, weights, activation) and not adds_bias


weighted_activation_triton.keeps_only_arguments = keeps_only_arguments  # type: ignore[attr-defined]


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, product: Tensor, weights: Tensor | None, activation: Activation, notes_largest: bool
    ) -> Tensor:
        product = product.contiguous()
        weights = None if weights is None else weights.contiguous()
        ctx.save_for_backward(product, weights)
        ctx.activation, ctx.notes_largest = activation, notes_largest
        return _activated(product, None, weights, activation, notes_largest)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        product, weights = ctx.saved_tensors
        product_gradient = torch.empty_like(product)
        weights_gradient = None if weights is None else torch.empty_like(weights)
        ffn = gradient.shape[-1]
        if gradient.numel():
            largest = _notes(product, weights) if ctx.notes_largest else None
            _activation_backward_kernel[(gradient.numel() // ffn,)](
                product_gradient, largest, weights_gradient, gradient.contiguous(), product, weights, ffn,
                *_numbers(ctx.activation), **_facts(ctx.activation), WEIGHTED=weights is not None,
                NOTES=_kind_of_notes(largest), BLOCK=_block(ffn),
            )  # fmt: skip
            if largest is not None:
                note_largest(product_gradient, largest.view(torch.float32))
        return product_gradient, weights_gradient, None, None


class _BiasedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, product: Tensor, bias: Tensor, activation: Activation) -> Tensor:
        product = product.contiguous()
        ctx.save_for_backward(product)
        # The parameter, not a saved tensor: see ops/linear.py.
        ctx.bias, ctx.activation = bias, activation
        return _activated(product, bias, None, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (product,), bias, ffn = ctx.saved_tensors, ctx.bias.detach(), gradient.shape[-1]
        product_gradient = torch.empty_like(product)
        rows, blocks = gradient.numel() // ffn, cdiv(ffn, _COLUMNS)
        parts = max(1, min(_PROGRAMS * num_multiprocessors(gradient.device) // blocks, cdiv(rows, _ROWS)))
        per_program = cdiv(cdiv(rows, parts), _ROWS) * _ROWS
        bias_parts = torch.empty(parts, product.shape[-1], dtype=torch.float32, device=gradient.device)
        _biased_activation_backward_kernel[(blocks, parts)](
            product_gradient, bias_parts, gradient.contiguous(), product, bias, rows, ffn, per_program,
            *_numbers(ctx.activation), **_facts(ctx.activation), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        return product_gradient, sum_rows_triton(bias_parts, bias.dtype), None


def _activated(
    product: Tensor, bias: Tensor | None, weights: Tensor | None, activation: Activation, notes_largest: bool = False
) -> Tensor:
    ffn = product.shape[-1] // (2 if activation.gated else 1)
    output = product.new_empty(*product.shape[:-1], ffn)
    if output.numel():
        block = _block(ffn)
        largest = _notes(product, weights) if notes_largest else None
        _activation_forward_kernel[(output.numel() // ffn, cdiv(ffn, block))](
            output, largest, product, bias, weights, ffn, *_numbers(activation), **_facts(activation),
            BIASED=bias is not None, WEIGHTED=weights is not None, NOTES=_kind_of_notes(largest), BLOCK=block,
        )  # fmt: skip
        if largest is not None:
            note_largest(output, largest.view(torch.float32))
    return output


def _notes(product: Tensor, weights: Tensor | None) -> Tensor:
    """Returns the memory for the bits of the largest value of all rows or, with weights, of each row."""
    shape = () if weights is None else (weights.numel(),)
    return torch.zeros(shape, dtype=torch.int32, device=product.device)


def _kind_of_notes(largest: Tensor | None) -> int:
    """Returns 0 for no notes, 1 for one value, 2 for one of each row."""
    return 0 if largest is None else 1 + largest.dim()


def _block(ffn: int) -> int:
    return min(_BLOCK, next_power_of_2(ffn))


def _numbers(activation: Activation) -> tuple[float, float]:
    return 0.0 if activation.clamp is None else float(activation.clamp), float(activation.up_offset)


def _facts(activation: Activation) -> dict[str, Any]:
    return {
        "KIND": _KINDS[activation.function],
        "GATED": activation.gated,
        "CLAMPED": activation.clamp is not None,
    }
