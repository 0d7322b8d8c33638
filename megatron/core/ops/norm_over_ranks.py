"""RMSNorm of vectors whose elements are split over a group of ranks."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import Group, all_reduce, group_size
from megatron.core.ops.precision import at_least_float32, widened
from megatron.core.utils.autograd_context import AutogradContext


def rms_norm_over_ranks(
    inputs: Tensor, weight: Tensor, epsilon: float, zero_centered: bool = False, group: Group = None, first: int = 0
) -> Tensor:
    """Returns `ops.norm.rms_norm` over the last dimension, which is split evenly over the ranks: [..., part].

    The rank's elements are multiplied by the weights from index `first` on. Several ranks may hold copies of an
    element, if all elements have the same number of copies. Each rank then computes its share of the gradient.
    """
    return _NormOverRanks.apply(inputs, weight, epsilon, zero_centered, group, first)


class _NormOverRanks(torch.autograd.Function):
    """Computes the formulas of `ops.norm._RMSNorm` with two sums over the group: of squares in forward, of g n in
    backward. If each element has c copies, both means stay right: sums and counts contain each element c times."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        inputs: Tensor,
        weight: Tensor,
        epsilon: float,
        zero_centered: bool,
        group: Group,
        first: int,
    ) -> Tensor:
        x = widened(inputs)
        count = x.shape[-1] * group_size(group)
        squares = all_reduce(x.square().sum(-1, keepdim=True), group)
        inverse_rms = torch.rsqrt(squares / count + epsilon)
        ctx.save_for_backward(inputs, inverse_rms)
        ctx.weight = weight  # instead of a saved tensor; `ops.linear._Linear` says why
        ctx.count, ctx.zero_centered, ctx.group, ctx.first = count, zero_centered, group, first
        return (x * inverse_rms * _factor(weight, zero_centered, first, x.shape[-1])).to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        (inputs, inverse_rms), weight = ctx.saved_tensors, ctx.weight.detach()
        width = inputs.shape[-1]
        dy = output_gradient.to(inverse_rms.dtype)
        normalized = inputs.to(inverse_rms.dtype) * inverse_rms
        weight_gradient = torch.zeros_like(weight)
        weight_gradient[ctx.first : ctx.first + width] = (dy * normalized).reshape(-1, width).sum(0)
        dy = dy * _factor(weight, ctx.zero_centered, ctx.first, width)
        projection = all_reduce((dy * normalized).sum(-1, keepdim=True), ctx.group) / ctx.count
        inputs_gradient = ((dy - normalized * projection) * inverse_rms).to(inputs.dtype)
        return inputs_gradient, weight_gradient, None, None, None, None


def _factor(weight: Tensor, zero_centered: bool, first: int, width: int) -> Tensor:
    factor = weight[first : first + width].to(at_least_float32(weight.dtype))
    return factor + 1.0 if zero_centered else factor
