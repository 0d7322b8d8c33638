"""Random numbers of tokens: functions of (seed, iteration, layer, site, global token index, channel), as dropout's
masks are, and so the same for every layout."""

import math

import torch
from torch import Tensor

from megatron.core.counter_rng import philox
from megatron.core.ops.dropout.dropout import DropoutRngPosition


def token_uniform(place: DropoutRngPosition, width: int) -> Tensor:
    """Uniform in the open interval (0, 1), float64 [t, width]."""
    return (_words(place, width)[0].double() + 0.5) * 2.0**-32


def token_normal(place: DropoutRngPosition, width: int) -> Tensor:
    """N(0, 1), float64 [t, width]: Box-Muller on two words each."""
    first, second = _words(place, width)
    radius = torch.sqrt(-2.0 * torch.log((first.double() + 0.5) * 2.0**-32))
    return radius * torch.cos(second.double() * (2.0 * math.pi * 2.0**-32))


def _words(place: DropoutRngPosition, width: int) -> tuple[Tensor, Tensor]:
    """Two independent 32-bit words for each channel of each token, int64 [t, width]."""
    token = place.tokens.index[:, None]
    channel = torch.arange(width, device=token.device)
    draw = place.draw(0.0)
    first, second, _, _ = philox((token, channel, draw.iteration, token >> 32), draw.key)
    return first, second
