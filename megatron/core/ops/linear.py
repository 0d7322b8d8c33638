"""y = x W^T + b, whose weight gradient goes where the weight says.

The product dW = dy^T x is apart from dX: it is handed, as its two factors, to the weight's gradient sink, which may
accumulate it at once inside the product or keep the factors for later (zero-bubble pipelines). A weight without a sink
gets an ordinary gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.parameters import gradient_sink


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., in] x [out, in] (+ [out]) -> [..., out], in the type of the inputs."""
    return _Linear.apply(inputs, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs)
        # The parameter, not a saved tensor: under full sharding its storage goes away and comes back before backward.
        ctx.weight = weight
        return _affine(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        inputs_gradient = weight_gradient = bias_gradient = None
        if needs_inputs:
            inputs_gradient = product(output_gradient, weight.detach())
        if needs_weight or needs_bias:
            rows = output_gradient.reshape(-1, weight.shape[0])  # [t, out]
        if needs_weight:
            columns = inputs.detach().reshape(-1, weight.shape[1])  # [t, in]
            sink = gradient_sink(weight)
            if sink is None:
                weight_gradient = product(rows.t(), columns)
            else:
                sink.add_product(rows, columns)
        if needs_bias:
            bias_gradient = rows.sum(0)
        return inputs_gradient, weight_gradient, bias_gradient


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right. Half precision on a CPU multiplies in float32 and rounds: there is no fast half product there."""
    if _slow_here(left):
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def _affine(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _slow_here(inputs):
        return F.linear(inputs.float(), weight.float(), None if bias is None else bias.float()).to(inputs.dtype)
    return F.linear(inputs, weight, bias)


def _slow_here(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float16 and not tensor.is_cuda
