"""RMSNorm of each head and rotary positions, one after the other: queries and keys of models with norms of heads."""

from torch import Tensor

from megatron.core.ops.norm import rms_norm
from megatron.core.ops.rope import Rotation, apply_rope


def normed_rope(heads: Tensor, weight: Tensor, epsilon: float, zero_centered: bool, rotation: Rotation) -> Tensor:
    """Returns `apply_rope` of `rms_norm` of heads [s, b, heads, d] or [s, b, groups, heads, d], with one weight [d] for
    all heads. The result is contiguous and has the weight's type."""
    return apply_rope(rms_norm(heads, weight, epsilon, zero_centered), rotation)
