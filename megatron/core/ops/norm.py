"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019) over the last dimension.

Statistics and the affine part are computed in the wider of float32 and the types given. The result has the weight's
type, so after a float32 residual stream the next product computes in the weight's type. Without a weight the result has
the input's type. Inputs are [..., h], weight and bias [h].
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.precision import at_least_float32, widened
from megatron.core.utils.autograd_context import AutogradContext


def layer_norm(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, zero_centered: bool = False
) -> Tensor:
    """Returns (x - mean) / sqrt(variance + epsilon) * weight + bias; with `zero_centered` the factor is 1 + weight."""
    if weight is None:
        return F.layer_norm(inputs, inputs.shape[-1:], None, None, epsilon)
    if zero_centered:
        weight_type, weight = weight.dtype, widened(weight) + 1.0
        bias = None if bias is None else widened(bias)
        return F.layer_norm(widened(inputs), weight.shape, weight, bias, epsilon).to(weight_type)
    if inputs.dtype is not weight.dtype:
        inputs, output_type = widened(inputs), weight.dtype
        bias = None if bias is None else bias.to(inputs.dtype)
        return F.layer_norm(inputs, weight.shape, weight.to(inputs.dtype), bias, epsilon).to(output_type)
    return F.layer_norm(inputs, weight.shape, weight, bias, epsilon)  # torch accumulates half types in float32


def rms_norm(inputs: Tensor, weight: Tensor | None, epsilon: float, zero_centered: bool = False) -> Tensor:
    """Returns x / sqrt(mean(x^2) + epsilon) * weight; with `zero_centered` the factor is 1 + weight."""
    return _RMSNorm.apply(inputs, weight, epsilon, zero_centered)


def layer_norm_with_residual(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns (`layer_norm` of x, x). The caller adds the second result to the output of the branch that reads the
    first, so that one backward gets both gradients: a kernel can add the residual's gradient to the norm's."""
    return layer_norm(inputs, weight, bias, epsilon, zero_centered), inputs


def rms_norm_with_residual(
    inputs: Tensor, weight: Tensor | None, epsilon: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns (`rms_norm` of x, x); see `layer_norm_with_residual`."""
    return rms_norm(inputs, weight, epsilon, zero_centered), inputs


class _RMSNorm(torch.autograd.Function):
    """Backward keeps the input and one number per row. With r = 1/sqrt(mean(x^2) + eps), n = x r and g = dy w:
    dx = r (g - n mean(g n)), dw = sum over rows of dy n."""

    @staticmethod
    def forward(
        ctx: AutogradContext, inputs: Tensor, weight: Tensor | None, epsilon: float, zero_centered: bool
    ) -> Tensor:
        x = widened(inputs)
        inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(inputs, inverse_rms)
        # Keeps the parameter instead of a saved tensor; `ops.linear._Linear` says why.
        ctx.weight, ctx.zero_centered = weight, zero_centered
        if weight is None:
            return _converted(x * inverse_rms, inputs.dtype)
        return _converted(x * inverse_rms * _factor(weight, zero_centered), weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (inputs, inverse_rms), weight = ctx.saved_tensors, None if ctx.weight is None else ctx.weight.detach()
        dy = output_gradient.to(inverse_rms.dtype)
        normalized = inputs.to(inverse_rms.dtype) * inverse_rms
        inputs_gradient = weight_gradient = None
        if weight is not None and ctx.needs_input_grad[1]:
            weight_gradient = (dy * normalized).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            if weight is not None:
                dy = dy * _factor(weight, ctx.zero_centered)
            projection = (dy * normalized).mean(-1, keepdim=True)
            inputs_gradient = ((dy - normalized * projection) * inverse_rms).to(inputs.dtype)
        return inputs_gradient, weight_gradient, None, None


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    factor = weight.to(at_least_float32(weight.dtype))
    return factor + 1.0 if zero_centered else factor


def _converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns values.to(dtype), without a call that changes nothing: torch.compile of torch 2.11 returns gradients of
    zero if the last call of a forward returns its own argument (pytorch issue 180642)."""
    return values if values.dtype is dtype else values.to(dtype)
