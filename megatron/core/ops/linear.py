"""The linear layer y = x W^T + b, with tensor parallel communication that overlaps with its products.

Backward computes dx and passes the two factors of dW = dy^T x to the weight's main gradient. The main gradient
accumulates the product at once, or keeps the factors for later (zero-bubble pipelines). A weight without a main
gradient gets an ordinary `.grad`.

With a group, each rank has some rows of the weight, and backward sums dx over the ranks while it computes dW. Under
sequence parallelism (Korthikanti et al. 2022) each rank also has only its part of the inputs. Forward gathers all
parts. Backward gathers them again for dW while it computes dx, so only the rank's own part is kept in between.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import (
    Group,
    Pending,
    gather_rows,
    start_all_reduce,
    start_gather_rows,
    start_reduce_scatter_rows,
)
from megatron.core.parameters import main_grad_accumulator
from megatron.core.utils.autograd_context import AutogradContext


@dataclass(frozen=True)
class SequenceShard:
    """This rank's rows of the inputs of a deferred weight gradient. Their product gathers all rows when it runs."""

    rows: Tensor
    """[t / ranks, in]"""
    group: Group

    def start_gather(self) -> Pending:
        """Starts to gather all rows, [t, in]. All ranks of the group run their deferred products in the same order."""
        return start_gather_rows(self.rows, self.group)


def sum_rows(rows: Tensor) -> Tensor:
    """Returns the sum over the first dimension: [t, out] -> [out]."""
    return rows.sum(0)


def linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: Group = None,
    *,
    gathers: bool = False,
    sum_rows: Callable[[Tensor], Tensor] = sum_rows,
    out_dtype: torch.dtype | None = None,
    trains_weight: bool = True,
) -> Tensor:
    """Returns inputs @ weight^T + bias: [..., in] x [out, in] (+ [out]) -> [..., out], in the type of the inputs.

    The ranks of `group` have the same inputs and different rows of the weight; backward sums the inputs' gradient over
    the ranks. With `gathers` each rank gives its part of the inputs' first dimension, in group order, and gets the
    gradient of that part; the outputs are those of all parts. `sum_rows` computes the bias's gradient: [t, out] ->
    [out].

    With `out_dtype` the outputs have that type and are rounded once; their gradient is rounded to the type of the
    inputs. With `trains_weight=False` the weight gets no gradient.
    """
    return _Linear.apply(inputs, weight, bias, group, gathers, sum_rows, out_dtype, trains_weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        gathers: bool,
        sum_rows: Callable[[Tensor], Tensor],
        out_dtype: torch.dtype | None,
        trains_weight: bool,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.trains_weight = trains_weight
        # Keeps the parameter, not a saved tensor: full sharding frees its storage and gathers it again before backward.
        ctx.weight, ctx.group, ctx.gathers, ctx.sum_rows = weight, group, gathers, sum_rows
        x = gather_rows(inputs, group) if gathers else inputs
        return _affine(x, weight, bias) if out_dtype in (None, x.dtype) else _to_type(x, weight, bias, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        needs_inputs, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        needs_weight = needs_weight and ctx.trains_weight
        dy = output_gradient.reshape(-1, weight.shape[0]).to(inputs.dtype)  # [t, out]
        x = inputs.detach().reshape(-1, weight.shape[1])  # [t, in]; with `gathers` this rank's part
        defers = defers_weight_grad(weight)
        gathered = start_gather_rows(x, ctx.group) if ctx.gathers and needs_weight and not defers else None
        dx = _start_inputs_gradient(dy, weight, ctx.group, ctx.gathers) if needs_inputs else None
        weight_gradient = bias_gradient = None
        if needs_weight:
            if gathered is not None:
                x = gathered.wait()
            weight_gradient = add_weight_gradient(
                weight, dy, SequenceShard(x, ctx.group) if ctx.gathers and defers else x
            )
        if needs_bias:
            bias_gradient = ctx.sum_rows(dy)
        inputs_gradient = None if dx is None else dx.wait().view(inputs.shape)
        return inputs_gradient, weight_gradient, bias_gradient, *[None] * 5


def _start_inputs_gradient(dy: Tensor, weight: Tensor, group: Group, scatters: bool) -> Pending:
    gradient = product(dy, weight.detach())  # [t, in]
    return start_reduce_scatter_rows(gradient, group) if scatters else start_all_reduce(gradient, group)


def defers_weight_grad(weight: Tensor) -> bool:
    """Whether the weight's main gradient keeps the factors of products for later."""
    return getattr(main_grad_accumulator(weight), "defers_weight_grad", False)


def add_weight_gradient(weight: Tensor, rows: Tensor, columns: Tensor | SequenceShard) -> Tensor | None:
    """Adds rows^T @ columns to the weight's main gradient. Returns the product for a weight without a main gradient."""
    main_grad = main_grad_accumulator(weight)
    if main_grad is not None:
        main_grad.add_product(rows, columns)
        return None
    assert isinstance(columns, Tensor)
    return product(rows.t(), columns)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns left @ right (+ bias), written to `out` if it is given. On a CPU float16 is multiplied in float32 and
    rounded, because CPUs have no fast product of float16."""
    if _is_half_on_cpu(left):
        wide = left.float() @ right.float()
        rounded = (wide if bias is None else wide + bias).to(left.dtype)
        return rounded if out is None else out.copy_(rounded)
    return torch.matmul(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)


def _affine(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _is_half_on_cpu(inputs):
        return F.linear(inputs.float(), weight.float(), None if bias is None else bias.float()).to(inputs.dtype)
    return F.linear(inputs, weight, bias)


def _to_type(inputs: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the outputs in `dtype`, rounded once from the float32 accumulator."""
    if inputs.is_cuda and dtype is torch.float32 and inputs.dtype in (torch.bfloat16, torch.float16):
        rows = inputs.reshape(-1, inputs.shape[-1])
        wide = torch.mm(rows, weight.t(), out_dtype=dtype).view(*inputs.shape[:-1], weight.shape[0])
        return wide if bias is None else wide.add_(bias)
    compute = torch.promote_types(inputs.dtype, torch.float32)
    return F.linear(inputs.to(compute), weight.to(compute), None if bias is None else bias.to(compute)).to(dtype)


def _is_half_on_cpu(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float16 and not tensor.is_cuda
