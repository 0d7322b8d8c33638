"""RMSNorm with a gate, before or after it: what Mamba-2 layers and gated delta nets do before their last product."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.norm import rms_norm
from megatron.core.ops.precision import widened


def gated_rms_norm(inputs: Tensor, gate: Tensor, weight: Tensor, epsilon: float, gate_first: bool) -> Tensor:
    """Returns norm(x silu(z)) with `gate_first`, as in Mamba-2, otherwise norm(x) silu(z), as in a gated delta net, for
    x and z [s, b, g, n] or [s, b, g, r, n]. The norm is over the last dimension; its weight is [n], or [g, n] for each
    group's own.

    Computed in float32 at least; the result has the type of the gate.
    """
    factor = F.silu(widened(gate))
    if not gate_first:
        return (rms_norm(inputs, weight, epsilon) * factor).to(gate.dtype)
    weight = widened(weight)
    if weight.dim() == 2:
        weight = weight.view(weight.shape[0], *[1] * (inputs.dim() - 4), weight.shape[1])
    gated = inputs * factor
    mean_square = gated.square().mean(-1, keepdim=True)
    return (gated * torch.rsqrt(mean_square + epsilon) * weight).to(gate.dtype)
