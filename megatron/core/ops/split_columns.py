"""Splits the columns of a projection into parts of any widths."""

from collections.abc import Sequence

from torch import Tensor


def split_columns(packed: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns views [s, b, g, width] of [s, b, g, columns], one for each of `widths`, which add up to the columns.
    Backward copies the gradients of the parts into one packed tensor."""
    return packed.split(list(widths), -1)
