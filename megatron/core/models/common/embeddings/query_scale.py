"""Scaling of queries by their position, in layers without rotary positions (Llama 4's temperature)."""

from typing import Any

import torch
from torch import Tensor


def query_scale(config: Any, positions: Tensor) -> Tensor | None:
    """Returns the factor of queries in layers without rotary positions, by the config's `nope_temperature_scale`:
    positions int64 [b or 1, s] -> float32 [s, b or 1, 1, 1]. None: 1."""
    scale = config.nope_temperature_scale
    if scale is None:
        return None
    steps = torch.floor((positions.t().to(torch.float32) + 1.0) / config.nope_temperature_floor)
    return (torch.log1p(steps) * scale + 1.0)[:, :, None, None]
