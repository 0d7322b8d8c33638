"""The activation of an MLP or an expert, times the router's weight of each row."""

from torch import Tensor

from megatron.core.ops.activation import Activation


def weighted_activation(product: Tensor, bias: Tensor | None, weights: Tensor | None, activation: Activation) -> Tensor:
    """Returns activation(product + bias), times each row's weight if `weights` is given.

    `product` [..., f * ffn] (f = 2 if gated), `bias` broadcasts to it, `weights` [...] -> [..., ffn]. The product with
    the weights is computed in the wider type and rounded to the type of the rows.
    """
    activated = activation(product, bias)
    return activated if weights is None else weighted(activated, weights)


def weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Returns rows [..., h] times their weights [...], computed in the wider type and rounded to the rows' type."""
    return (rows * weights.unsqueeze(-1)).to(rows.dtype)
