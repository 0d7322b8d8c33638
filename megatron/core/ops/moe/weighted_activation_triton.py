"""Activation, gate and, of an expert's rows, the router's weight in one pass on a GPU, and one in backward.

Only the product that is activated is kept for backward; everything between it and the result is computed in float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.activation import Activation, gelu_erf, gelu_tanh, quick_gelu, squared_relu
from megatron.core.ops.moe.weighted_activation import weighted_activation

_KINDS = {F.silu: 0, gelu_tanh: 1, gelu_erf: 2, F.gelu: 2, quick_gelu: 3, squared_relu: 4, F.relu: 5}
_BLOCK = 1024
"""Channels that a program computes at once."""
_NANS = tl.constexpr(tl.PropagateNan.ALL)
"""As torch has it, and not the other number: what is no number any more must reach the loss, and be seen."""


@triton.jit
def _activate(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """f(x) and f'(x)."""
    if KIND == 0:  # x sigmoid(x)
        s = tl.sigmoid(x)
        value, slope = x * s, s * (1.0 + x * (1.0 - s))
    elif KIND == 1:  # tanh(u) = 2 sigmoid(2 u) - 1
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        t = 2.0 * tl.sigmoid(2.0 * u) - 1.0
        value = 0.5 * x * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
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
def _forward_kernel(  # type: ignore[no-untyped-def]
    output, product, weights, ffn, clamp, up_offset,
    KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < ffn
    at = product + row * ffn * (2 if GATED else 1) + channel
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, clamp, _NANS)
    value, _ = _activate(gate, KIND)
    if GATED:
        up = tl.load(at + ffn, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            up = tl.minimum(tl.maximum(up, -clamp, _NANS), clamp, _NANS)
        value *= up + up_offset
    if WEIGHTED:
        value *= tl.load(weights + row).to(tl.float32)
    tl.store(output + row * ffn + channel, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    product_gradient, weights_gradient, gradient, product, weights, ffn, clamp, up_offset,
    KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32) if WEIGHTED else 1.0
    start = row * ffn * (2 if GATED else 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, ffn, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        inside = channel < ffn
        given = tl.load(product + start + channel, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(gradient + row * ffn + channel, mask=inside, other=0.0).to(tl.float32)
        gate = tl.minimum(given, clamp, _NANS) if CLAMPED else given
        value, slope = _activate(gate, KIND)
        if GATED:
            given_up = tl.load(product + start + ffn + channel, mask=inside, other=0.0).to(tl.float32)
            up = tl.minimum(tl.maximum(given_up, -clamp, _NANS), clamp, _NANS) if CLAMPED else given_up
            total += dy * value * (up + up_offset)
            up_gradient = dy * weight * value
            if CLAMPED:
                up_gradient = tl.where((given_up >= -clamp) & (given_up <= clamp), up_gradient, 0.0)
            tl.store(
                product_gradient + start + ffn + channel,
                up_gradient.to(product_gradient.dtype.element_ty),
                mask=inside,
            )
            slope *= up + up_offset
        else:
            total += dy * value
        gate_gradient = dy * weight * slope
        if CLAMPED:
            gate_gradient = tl.where(given <= clamp, gate_gradient, 0.0)
        tl.store(product_gradient + start + channel, gate_gradient.to(product_gradient.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(weights_gradient + row, tl.sum(total).to(weights_gradient.dtype.element_ty))


def weighted_activation_triton(
    product: Tensor, bias: Tensor | None, weights: Tensor | None, activation: Activation
) -> Tensor:
    """As `weighted_activation`, which it leaves to it in float64 and for other activations."""
    exact = torch.float64 in (product.dtype, None if weights is None else weights.dtype)
    if exact or not isinstance(activation, Activation) or activation.function not in _KINDS:
        return weighted_activation(product, bias, weights, activation)
    return _WeightedActivation.apply(product if bias is None else product + bias, weights, activation)


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, weights: Tensor | None, activation: Activation) -> Tensor:
        product = product.contiguous()
        weights = None if weights is None else weights.contiguous()
        ctx.save_for_backward(product, weights)
        ctx.activation = activation
        ffn = product.shape[-1] // (2 if activation.gated else 1)
        output = product.new_empty(*product.shape[:-1], ffn)
        if output.numel():
            block = _block(ffn)
            _forward_kernel[(output.numel() // ffn, triton.cdiv(ffn, block))](
                output, product, product if weights is None else weights, ffn, *_numbers(activation),
                **_facts(activation), WEIGHTED=weights is not None, BLOCK=block,
            )  # fmt: skip
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        product, weights = ctx.saved_tensors
        product_gradient = torch.empty_like(product)
        weights_gradient = None if weights is None else torch.empty_like(weights)
        ffn = gradient.shape[-1]
        if gradient.numel():
            _backward_kernel[(gradient.numel() // ffn,)](
                product_gradient, product if weights_gradient is None else weights_gradient, gradient.contiguous(),
                product, product if weights is None else weights, ffn, *_numbers(ctx.activation),
                **_facts(ctx.activation), WEIGHTED=weights is not None, BLOCK=_block(ffn),
            )  # fmt: skip
        return product_gradient, weights_gradient, None


def _block(ffn: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(ffn))


def _numbers(activation: Activation) -> tuple[float, float]:
    return 0.0 if activation.clamp is None else float(activation.clamp), float(activation.up_offset)


def _facts(activation: Activation) -> dict[str, Any]:
    return {
        "KIND": _KINDS[activation.function],
        "GATED": activation.gated,
        "CLAMPED": activation.clamp is not None,
    }
