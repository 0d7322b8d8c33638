"""Rotary positions: from a model's settings and token positions to the angles' cosines and sines."""

import math

import torch
from torch import Tensor, nn

from megatron.core.collectives import Group
from megatron.core.ops.rope import Rotation

# The scaling with which Llama 3.1 was lengthened (Grattafiori et al. 2024).
_LOW_FREQUENCY_FACTOR, _HIGH_FREQUENCY_FACTOR, _OLD_CONTEXT = 1.0, 4.0, 8192


class RotaryEmbedding(nn.Module):
    """Angles position * base^(-2i/r) for i < r/2, with r = kv_channels * rotary_percent channels of each head turned.

    `seq_len_interpolation_factor` divides the positions. `rope_scaling` stretches low frequencies by
    `rope_scaling_factor`, as Llama 3.1. Angles are float32, as in the models that were published with them.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
        cp_group: Group = None,
    ) -> None:
        super().__init__()
        turned = kv_channels if rotary_percent >= 1.0 else int(kv_channels * rotary_percent)
        self.rotary_interleaved = rotary_interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        exponent = torch.arange(0, turned, 2, dtype=torch.float32, device="cpu") / turned
        inverse = 1.0 / (float(rotary_base) ** exponent)
        # Neither parameter nor buffer: a cast of the model to half precision leaves it alone.
        self._inverse_frequency = {"cpu": scale_as_llama3(inverse, rope_scaling_factor) if rope_scaling else inverse}

    def inverse_frequency(self, device: torch.device) -> Tensor:
        """Radians a position, float32 [r / 2]; kept for each device that asked."""
        key = str(device)
        if key not in self._inverse_frequency:
            self._inverse_frequency[key] = self._inverse_frequency["cpu"].to(device)
        return self._inverse_frequency[key]

    def forward(self, positions: Tensor) -> Rotation:
        """int64 [b or 1, s] -> the rotation of each token: cosines and sines, float32 [s, b or 1, 1, r / 2]."""
        position = positions.t().to(torch.float32)[:, :, None, None]  # [s, b, 1, 1]
        if self.seq_len_interpolation_factor is not None:
            position = position * (1.0 / self.seq_len_interpolation_factor)
        angle = position * self.inverse_frequency(positions.device)
        return Rotation(angle.cos(), angle.sin(), self.rotary_interleaved)


def scale_as_llama3(inverse_frequency: Tensor, factor: float) -> Tensor:
    """Frequencies of the longer context: long wavelengths stretched by `factor`, short ones left, and between them a
    mixture."""
    wavelength = 2.0 * math.pi / inverse_frequency
    kept = (_OLD_CONTEXT / wavelength - _LOW_FREQUENCY_FACTOR) / (_HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * inverse_frequency / factor + kept * inverse_frequency
