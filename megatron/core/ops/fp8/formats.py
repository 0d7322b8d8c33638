"""The fp8 number formats and the scales that fill their range (Micikevicius et al. 2022, arXiv:2209.05433)."""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Elements along each side of a block with one scale, in the blockwise recipe."""


@dataclass(frozen=True)
class Fp8Formats:
    """The types of a layer's quantised tensors."""

    inputs: torch.dtype = torch.float8_e4m3fn
    """Inputs and weights."""
    gradients: torch.dtype = torch.float8_e4m3fn
    """Gradients of outputs."""


FORMATS = {"e4m3": Fp8Formats(), "hybrid": Fp8Formats(gradients=torch.float8_e5m2)}
"""The formats by their names in `--fp8-format`."""


def largest_finite(dtype: torch.dtype) -> float:
    """Returns the largest finite number of a type: 448 of e4m3, 57344 of e5m2."""
    return torch.finfo(dtype).max


def scale_for(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Returns the factors (float32) that map the largest absolute values `amax` to the largest number of `dtype`,
    divided by 2^margin.

    An amax of 0 has the factor 1. Factors stay finite for a tiny amax. An amax that is not finite gives 0 or NaN, so
    that the quantised values become NaN and the error reaches the loss.
    """
    amax = amax.float()
    # A quotient of two tensors is rounded once; torch computes number / tensor as number * (1 / tensor).
    scale = torch.full_like(amax, largest_finite(dtype) * 2.0**-margin) / amax
    scale = torch.where(scale.isinf(), torch.finfo(torch.float32).max, scale)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values rounded to an fp8 type, to nearest with ties to even. Values beyond the type's range become
    its largest number; infinities become NaN, because e4m3 has none and a limit would hide them."""
    limit = largest_finite(dtype)
    limited = values.clamp(-limit, limit)
    return torch.where(values.isinf(), torch.full_like(values, torch.nan), limited).to(dtype)
