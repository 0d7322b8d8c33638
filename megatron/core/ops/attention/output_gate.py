"""The gate of attention's output (Qiu et al. 2025, arXiv:2505.06708)."""

from torch import Tensor


def gate_output(context: Tensor, gate: Tensor) -> Tensor:
    """Returns context * sigmoid(gate), [s, b, g c], for attention's output [s, b, g c] and the gates [s, b, g, c] of
    the query groups."""
    return context * gate.flatten(2).sigmoid()
