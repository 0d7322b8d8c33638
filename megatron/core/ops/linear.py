"""y = x W^T + b, whose weight gradient goes where the weight says, and whose exchange hides behind its products.

The product dW = dy^T x is apart from dX: it is handed, as its two factors, to the weight's main gradient, which may
accumulate it at once inside the product or keep the factors for later (zero-bubble pipelines). A weight without a main
gradient gets an ordinary `.grad`.

Over a group, each rank has some rows of one weight, and backward sums the inputs' gradient over the ranks while dW is
computed. Under sequence parallelism (Korthikanti et al. 2022) each rank also has only its part of the inputs: they are
gathered for the product and again, while dX is computed, for dW; only the part is kept in between.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import (
    Group,
    Pending,
    gather_rows,
    start_all_reduce,
    start_gather_rows,
    start_reduce_scatter_rows,
)
from megatron.core.parameters import main_grad_accumulator


@dataclass(frozen=True)
class SequenceShard:
    """This rank's rows of the inputs of a product that is put off, which gathers them when it is run."""

    rows: Tensor
    """[t / ranks, in]"""
    group: Group

    def start_gather(self) -> Pending:
        """[t, in]. All ranks of the group run their products in one order."""
        return start_gather_rows(self.rows, self.group)


def _sum_rows(rows: Tensor) -> Tensor:
    return rows.sum(0)


def linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: Group = None,
    *,
    gathers: bool = False,
    sum_rows: Callable[[Tensor], Tensor] = _sum_rows,
) -> Tensor:
    """[..., in] x [out, in] (+ [out]) -> [..., out], in the type of the inputs.

    `group`: ranks with the same inputs and other rows of the weight; the inputs' gradient is summed over them. With
    `gathers` each rank has its part of the inputs' first dimension, in group order, and gets its part of the gradient;
    the outputs have all of it. `sum_rows` computes the bias's gradient: [t, out] -> [out].
    """
    return _Linear.apply(inputs, weight, bias, group, gathers, sum_rows)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        gathers: bool,
        sum_rows: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # The parameter, not a saved tensor: under full sharding its storage goes away and comes back before backward.
        ctx.weight, ctx.group, ctx.gathers, ctx.sum_rows = weight, group, gathers, sum_rows
        return _affine(gather_rows(inputs, group) if gathers else inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        needs_inputs, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = output_gradient.reshape(-1, weight.shape[0])  # [t, out]
        columns = inputs.detach().reshape(-1, weight.shape[1])  # [t, in]; this rank's part of it with `gathers`
        main_grad = main_grad_accumulator(weight)
        defers_weight_grad = getattr(main_grad, "defers_weight_grad", False)
        gathered = (
            start_gather_rows(columns, ctx.group) if ctx.gathers and needs_weight and not defers_weight_grad else None
        )
        summed = _start_inputs_gradient(rows, weight, ctx.group, ctx.gathers) if needs_inputs else None
        weight_gradient = bias_gradient = None
        if needs_weight:
            if gathered is not None:
                columns = gathered.wait()
            if main_grad is None:
                weight_gradient = product(rows.t(), columns)
            else:
                main_grad.add_product(
                    rows, SequenceShard(columns, ctx.group) if ctx.gathers and defers_weight_grad else columns
                )
        if needs_bias:
            bias_gradient = ctx.sum_rows(rows)
        inputs_gradient = None if summed is None else summed.wait().view(inputs.shape)
        return inputs_gradient, weight_gradient, bias_gradient, None, None, None


def _start_inputs_gradient(rows: Tensor, weight: Tensor, group: Group, scatters: bool) -> Pending:
    gradient = product(rows, weight.detach())  # [t, in]
    return start_reduce_scatter_rows(gradient, group) if scatters else start_all_reduce(gradient, group)


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
