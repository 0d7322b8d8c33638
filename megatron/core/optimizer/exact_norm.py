"""The norm of the gradient as an exact sum of squares: equal in every bit for any cut of the gradient into shards.

Squares are divided by the largest one, rounded up to a power of two, and cut into three numbers of 20 or 21 bits. Sums
of such numbers are whole numbers below 2^53, which float64 adds exactly in any order. What the third number leaves off
is below 2^-61 of the largest square, for each element.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.communication.collectives import Group, all_reduce

BITS = (20, 21, 21)
"""Bits of the three numbers. Each addend is at most 2^20, so 2^32 elements can be added."""
_AT_ONCE = 1 << 22
"""Elements that are squared at once, which bounds temporary memory."""


def exact_norm(gradients: Iterable[Tensor], group: Group, device: torch.device) -> Tensor:
    """Returns the 2-norm of one-dimensional gradients whose parts are spread over a group: a float64 scalar, equal on
    all its ranks, and not finite if any gradient is not. Does not wait for the device."""
    parts = [part for gradient in gradients for part in gradient.split(_AT_ONCE) if part.numel()]
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        largest = torch.maximum(largest, part.abs().amax().double())  # keeps NaN
    largest = torch.where(largest.isfinite(), largest, float("inf"))  # collectives may drop a NaN when they compare
    largest = all_reduce(largest, group, ReduceOp.MAX)
    finite = largest.isfinite()
    exponent = torch.where(finite, torch.frexp(torch.where(finite, largest, 1.0)).exponent, 0)
    sums = torch.zeros(len(BITS), dtype=torch.float64, device=device)
    for part in parts:
        for number, addends in enumerate(_addends(part.double().ldexp_(-exponent).square_())):
            sums[number] += addends.sum()
    all_reduce(sums, group)
    total, bits = torch.zeros((), dtype=torch.float64, device=device), 0
    for each, more in zip(sums, BITS, strict=True):
        bits += more
        total = total + each * 2.0**-bits
    return torch.where(finite, total.sqrt().ldexp(exponent), largest)


def _addends(squares: Tensor) -> Iterator[Tensor]:
    """Yields whole numbers whose sum, each times its power of two, is `squares` (in [0, 1], overwritten)."""
    for bits in BITS:
        squares.mul_(2.0**bits)
        whole = squares.round()
        yield whole
        squares -= whole
