"""How the parts of a layer of experts share its input, and how their outputs are added."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.linear import add_weight_gradient, product
from megatron.core.utils.autograd_context import AutogradContext


def add_shared(
    routed: Tensor, shared: Tensor | None, gate_logits: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Returns residual + routed + shared sigmoid(gate_logits), all [t, h] with logits [t, 1]. None: no such term, or no
    gate."""
    output = routed
    if shared is not None:
        output = routed + (shared if gate_logits is None else shared * torch.sigmoid(gate_logits))
    return output if residual is None else residual + output


@dataclass(frozen=True)
class ReadInput:
    """The input of a layer of experts, as each of its parts reads it: views [t, h] of the hidden states."""

    for_router: Tensor
    for_dispatch: Tensor
    for_shared: Tensor
    gate_logits: Tensor | None
    """Logits [t, 1] of the shared experts' gate; None without a gate."""


def sum_gradients(gradients: Sequence[Tensor], logits_gradient: Tensor | None, weight: Tensor | None) -> Tensor:
    """Returns the gradient [t, h] of the input: the sum of those of the views, and logits_gradient @ weight."""
    parts = list(gradients)
    if logits_gradient is not None and weight is not None:
        parts.append(product(logits_gradient, weight))
    return functools.reduce(torch.add, parts)


def read_input(
    hidden: Tensor,
    gate_weight: Tensor | None = None,
    sum_gradients: Callable[[Sequence[Tensor], Tensor | None, Tensor | None], Tensor] = sum_gradients,
) -> ReadInput:
    """Returns views of the hidden states [t, h] and, for a weight [1, h], the logits hidden @ gate_weight^T.

    Backward sums all gradients of the hidden states at once, where autograd would add one after the other."""
    return ReadInput(*_ReadInput.apply(hidden, gate_weight, sum_gradients))


class _ReadInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor | None,
        sum_gradients: Callable[[Sequence[Tensor], Tensor | None, Tensor | None], Tensor],
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(None if weight is None else hidden)
        ctx.weight, ctx.sum_gradients = weight, sum_gradients  # the parameter, not a saved tensor: see ops/linear.py
        logits = None if weight is None else product(hidden, weight.t())
        return *(hidden.view_as(hidden) for _ in range(3)), logits

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        *of_views, of_logits = gradients
        hidden_gradient = weight_gradient = None
        weight = None if of_logits is None else ctx.weight.detach()
        given = [gradient for gradient in of_views if gradient is not None]
        if ctx.needs_input_grad[0] and (given or of_logits is not None):
            hidden_gradient = ctx.sum_gradients(given, of_logits, weight)
        if ctx.needs_input_grad[1] and of_logits is not None:
            weight_gradient = add_weight_gradient(ctx.weight, of_logits, ctx.saved_tensors[0].detach())
        return hidden_gradient, weight_gradient, None
