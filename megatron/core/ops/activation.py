"""Activations of an MLP or an expert, plain or gated.

Each takes the product and its bias separately, so that one kernel can add the bias and apply the activation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Pointwise = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def gelu_erf(x: Tensor) -> Tensor:
    """Returns x Phi(x), the exact form of GELU."""
    return F.gelu(x)


def quick_gelu(x: Tensor) -> Tensor:
    """Returns x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    """Returns relu(x)^2 (So et al. 2021)."""
    return torch.square(F.relu(x))


@dataclass(frozen=True)
class Activation:
    """The activation between the two products of an MLP: [t, f * ffn] -> [t, ffn], f = 2 if gated, otherwise 1.

    Gated: function(gate) * up; the gate is the first half of the product (Shazeer 2020).
    """

    function: Pointwise
    gated: bool = False
    clamp: float | None = None
    """Gated only: clamps the gate to at most this, and the up half to its range [-clamp, clamp]."""
    up_offset: float = 0.0
    """Gated only: is added to the up half."""

    def __call__(self, product: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the activation of product + bias: [..., f * ffn] (f = 2 if gated) -> [..., ffn]."""
        x = product if bias is None else product + bias
        if not self.gated:
            return self.function(x)
        gate, up = x.chunk(2, dim=-1)
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        return self.function(gate) * (up + self.up_offset if self.up_offset else up)


def choose_activation(
    function: Pointwise,
    *,
    gated: bool = False,
    bias_fused: bool = False,
    clamp: float | None = None,
    up_offset: float = 0.0,
) -> Activation:
    """Returns the activation that a config names.

    As in Megatron-LM, `F.gelu` means the tanh form with `bias_fused` (gated or not), and the exact form without.
    """
    if function is F.gelu and bias_fused:
        function = gelu_tanh
    if not gated:
        return Activation(function)
    return Activation(function, True, clamp if clamp is None or math.isfinite(clamp) else None, up_offset)


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
