"""Random numbers of tokens. Like dropout masks they are functions of (seed, iteration, layer, site, global token index,
channel), so they are the same for every layout."""

import math

import torch
from torch import Tensor

from megatron.core.counter_rng import philox
from megatron.core.ops.dropout.dropout import DropoutRngPosition


def token_uniform(position: DropoutRngPosition, width: int) -> Tensor:
    """Returns uniform numbers in the open interval (0, 1), float64 [t, width]."""
    return (_words(position, width)[0].double() + 0.5) * 2.0**-32


def token_normal(position: DropoutRngPosition, width: int) -> Tensor:
    """Returns standard normal numbers, float64 [t, width], by Box-Muller on two words each."""
    first, second = _words(position, width)
    radius = torch.sqrt(-2.0 * torch.log((first.double() + 0.5) * 2.0**-32))
    return radius * torch.cos(second.double() * (2.0 * math.pi * 2.0**-32))


def _words(position: DropoutRngPosition, width: int) -> tuple[Tensor, Tensor]:
    """Returns two independent 32-bit words for each channel of each token, int64 [t, width]."""
    token = position.tokens.index[:, None]
    channel = torch.arange(width, device=token.device)
    draw = position.draw(0.0)
    first, second, _, _ = philox((token, channel, draw.iteration, token >> 32), draw.key)
    return first, second
