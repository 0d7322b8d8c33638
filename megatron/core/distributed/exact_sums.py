"""Sums of gradients that do not depend on the order: whole numbers in place of rounded ones.

Float32 addition rounds, so gradients that are summed over micro-batches first and ranks then have other last bits than
those that are summed over ranks first. Here the gradient of each micro-batch is rounded once, to a multiple of 2^-bits,
and from there on sums are sums of int64, which are exact in any order: over micro-batches, over data parallel ranks by
any algorithm of the collectives, and for any cut into shards. The gradient of a micro-batch does not depend on the rank
that computes it, so neither does the sum.

Numbers have 63 bits. MICRO_BATCHES contributions below `FixedPoint.limit` cannot overflow. A larger one, or one that is
not finite, marks the sum as bad, and the step's gradients become NaN on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.communication.collectives import Group, all_reduce

MICRO_BATCHES = 4096
"""Most contributions of a step."""
_AT_ONCE = 1 << 22
"""Elements that are converted at once, which bounds temporary memory."""


@dataclass(frozen=True)
class FixedPoint:
    """Numbers as int64 multiples of 2^-bits."""

    bits: int

    @property
    def limit(self) -> float:
        """Magnitudes from here on are refused."""
        return 2.0 ** (62 - self.bits) / MICRO_BATCHES

    def add(self, numbers: Tensor, total: Tensor, is_bad: Tensor) -> None:
        """Adds floating-point numbers [n] to a total [n] in int64. Sets `is_bad`, a bool scalar, if one is refused."""
        for part, sums in zip(numbers.split(_AT_ONCE), total.split(_AT_ONCE), strict=True):
            is_bad |= ~(part.abs() < self.limit).all()  # NaN is not below the limit either
            sums += part.double().mul_(2.0**self.bits).round_().long()

    def read(self, total: Tensor, out: Tensor) -> None:
        """Writes a total [n] in int64 to `out` [n], rounded once to its type."""
        for sums, part in zip(total.split(_AT_ONCE), out.split(_AT_ONCE), strict=True):
            part.copy_(sums.double().mul_(2.0**-self.bits))


MEANS = FixedPoint(44)
"""For gradients of mean losses: multiples of 6e-14, far below the epsilon of Adam."""
TOKEN_SUMS = FixedPoint(28)
"""For gradients of losses that are summed over tokens, and divided by the number of tokens later."""


class ExactSum:
    """A sum of gradients over the micro-batches of a step."""

    def __init__(self, number: FixedPoint, numel: int, device: torch.device) -> None:
        self.number = number
        self.total = torch.zeros(numel, dtype=torch.int64, device=device)
        """[n]: the sum so far, in int64."""
        self.is_bad = torch.zeros((), dtype=torch.bool, device=device)
        """Whether a contribution was refused on this rank."""

    def take(self, gradients: Tensor) -> None:
        """Adds the gradients [n] of a micro-batch and zeroes them for the next one."""
        self.number.add(gradients, self.total, self.is_bad)
        gradients.zero_()

    def reset(self) -> None:
        """Begins a step."""
        self.total.zero_()
        self.is_bad.zero_()


def spread_bad_sums(flags: Sequence[Tensor], gradients: Sequence[Tensor], group: Group) -> None:
    """Makes the first element of all gradients [n] NaN if a flag is set on any rank of the group. The norm of the
    gradient is then NaN on every rank, and the update is skipped. Does not wait for the device."""
    if not flags:
        return
    is_bad = all_reduce(torch.stack(list(flags)).any().float(), group, ReduceOp.MAX)
    for part in gradients:
        part[:1] += torch.where(is_bad > 0, float("nan"), 0.0)
