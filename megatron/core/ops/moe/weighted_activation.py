"""The activation of an MLP, and of an expert, times what the router makes of each row."""

from torch import Tensor

from megatron.core.ops.activation import Activation


def weighted_activation(product: Tensor, bias: Tensor | None, weights: Tensor | None, activation: Activation) -> Tensor:
    """activation(product + bias), times the weight of each row if they have any: [..., f * ffn], bias broadcast to it,
    [...] -> [..., ffn], with f = 2 where the activation is gated. The product with the weights is of the wider type,
    and rounded to the rows'."""
    activated = activation(product, bias)
    return activated if weights is None else weighted(activated, weights)


def weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Rows [..., h] by their weights [...], in the wider type, rounded to the rows'."""
    return (rows * weights.unsqueeze(-1)).to(rows.dtype)
