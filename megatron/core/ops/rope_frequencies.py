"""Frequencies of rotary positions, and how they are scaled for rows longer than those of the original training.

All functions are pure. They compute in float32, in the order of operations of the published models, because an angle
is a frequency times a position and so magnifies the frequency's rounding error.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the frequencies. The kind decides which of the other fields are used."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    """How many times longer rows become; with kind dynamic, how fast the base grows with their length."""
    original_length: int = 8192
    """Length of the longest row of the original training."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """llama3: see `llama3_frequencies`."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: see `yarn_frequencies`."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """longrope: a divisor for each frequency, for rows up to `original_length` and for longer rows."""
    attention_factor: float | None = None
    """Factor of cosines and sines; None: the default of the kind."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies of a row depend on its length."""
        return self.kind in ("dynamic", "longrope")

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines. Queries and keys both have it, so attention scores get its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return yarn_concentration(self.factor)
        if self.kind == "longrope" and self.factor > 1.0:
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))
        return 1.0


def plain_frequencies(rotary_dim: int, base: float) -> Tensor:
    """Returns base^(-2i/rotary_dim) radians per position for i < rotary_dim/2, [rotary_dim/2] (Su et al. 2021)."""
    return 1.0 / (float(base) ** _exponents(rotary_dim))


def scaled_frequencies(rotary_dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """Returns the frequencies [rotary_dim/2] for rows of up to `original_length` positions."""
    frequencies = plain_frequencies(rotary_dim, base)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_length
        return llama3_frequencies(frequencies, scaling.factor, low, high, length)
    if scaling.kind == "yarn":
        betas = scaling.beta_fast, scaling.beta_slow
        return yarn_frequencies(rotary_dim, base, scaling.factor, scaling.original_length, *betas, scaling.truncate)
    return longrope_frequencies(rotary_dim, base, torch.tensor(scaling.short_factor, dtype=torch.float32))


def frequencies_of_length(rotary_dim: int, base: float, scaling: RopeScaling, length: Tensor) -> Tensor:
    """Returns the frequencies of rows of the given lengths: int64 [..., 1] -> [..., rotary_dim/2]. Only for a scaling
    that depends on the length."""
    if scaling.kind == "dynamic":
        return dynamic_frequencies(rotary_dim, base, scaling.factor, scaling.original_length, length)
    divisors = torch.tensor([scaling.short_factor, scaling.long_factor], dtype=torch.float32, device=length.device)
    short, long = longrope_frequencies(rotary_dim, base, divisors)
    return torch.where(length > scaling.original_length, long, short)


def dynamic_frequencies(rotary_dim: int, base: float, factor: float, original_length: int, length: Tensor) -> Tensor:
    """Returns frequencies whose base grows with the row's length n beyond the original n0.

    The base is multiplied by (f n/n0 - (f - 1))^(r/(r - 2)): the lowest frequency then fits the row, and the highest
    does not change. int64 [..., 1] -> [..., rotary_dim/2]."""
    longer = length.clamp(min=original_length)
    growth = (factor * longer / original_length) - (factor - 1)
    bases = base * growth ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / (bases ** _exponents(rotary_dim, length.device))


def llama3_frequencies(
    frequencies: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_length: int
) -> Tensor:
    """Returns frequencies scaled as in Llama 3 (Grattafiori et al. 2024).

    A frequency is divided by `factor` if the original length has fewer than `low_freq_factor` of its wavelengths, kept
    if it has more than `high_freq_factor`, and interpolated in between.
    """
    wavelength = 2.0 * math.pi / frequencies
    kept = (original_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = kept.nan_to_num(1.0).clamp(0.0, 1.0)  # equal factors give 0 / 0
    return (1.0 - kept) * frequencies / factor + kept * frequencies


def yarn_frequencies(
    rotary_dim: int,
    base: float,
    factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """Returns YaRN frequencies [rotary_dim/2] (Peng et al. 2023, arXiv:2309.00071).

    A frequency is kept if the original length has more than `beta_fast` of its wavelengths, divided by `factor` if it
    has fewer than `beta_slow`, and interpolated linearly in the channel's index in between. With `truncate` the first
    and last interpolated channels are rounded outwards.
    """
    low, high = (
        rotary_dim * math.log(original_length / (beta * 2.0 * math.pi)) / (2.0 * math.log(base))
        for beta in (beta_fast, beta_slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    channel = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1.0 - ((channel - low) / (high - low)).clamp(0.0, 1.0)
    wavelengths = float(base) ** _exponents(rotary_dim)
    return 1.0 / (factor * wavelengths) * (1.0 - kept) + 1.0 / wavelengths * kept


def yarn_concentration(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """Returns the factor of cosines and sines for `yarn_frequencies`: m(mscale) / m(mscale_all_dim) with
    m(x) = 0.1 x ln(factor) + 1."""
    return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Returns m(mscale) = 0.1 mscale ln(factor) + 1, or 1 if rows do not become longer."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_frequencies(rotary_dim: int, base: float, divisors: Tensor) -> Tensor:
    """Returns each frequency divided by its own divisor: [..., rotary_dim/2] -> [..., rotary_dim/2]. The divisors were
    found by a search (LongRoPE, Ding et al. 2024, arXiv:2402.13753)."""
    return 1.0 / (divisors * float(base) ** _exponents(rotary_dim, divisors.device))


def _exponents(rotary_dim: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
