"""Queries, keys and values as parts of one packed projection."""

from collections.abc import Sequence

from torch import Tensor


def split_heads(packed: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns views [s, b, groups, size, d] of [s, b, groups, heads, d], one for each of `sizes`, which add up to the
    heads of a group. Backward copies the gradients of the parts into one packed tensor."""
    return packed.split(list(sizes), -2)
