"""Splits a packed projection into queries, gates, keys and values."""

from collections.abc import Sequence

from torch import Tensor

from megatron.core.ops.rope import Rotation, apply_rope


def split_heads(packed: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns views [s, b, groups, size, d] of [s, b, groups, heads, d], one for each of `sizes`.

    The sizes add up to the heads of a group. Backward copies the gradients of the parts into one packed tensor."""
    return packed.split(list(sizes), -2)


def split_rotated_heads(packed: Tensor, sizes: Sequence[int], rotation: Rotation) -> tuple[Tensor, ...]:
    """Returns the parts of `split_heads` for four `sizes`: queries, gates, keys and values. Queries and keys are
    rotated (`apply_rope`)."""
    query, gate, key, value = split_heads(packed, sizes)
    return apply_rope(query, rotation), gate, apply_rope(key, rotation), value
