"""Rotary positions against complex multiplication."""

import pytest
import torch
from torch import Tensor

from megatron.core.ops.rope import Rotation, apply_rope


def rotated(heads: Tensor, angles: Tensor, interleaved: bool, first: int) -> Tensor:
    """Multiplies each pair of channels, as a complex number, by e^(i angle)."""
    r = 2 * angles.shape[-1]
    part = heads[..., first : first + r]
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles))
    result = heads.clone()
    result[..., first : first + r] = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("first", [0, 3])
def test_pairs_are_rotated_and_other_channels_copied(interleaved: bool, first: int) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(5, 2, 3, 10, dtype=torch.float64, generator=generator).requires_grad_()
    angles = torch.randn(5, 1, 1, 3, dtype=torch.float64, generator=generator)
    rotation = Rotation(angles.cos(), angles.sin(), interleaved, first)
    found, expected = apply_rope(heads, rotation), rotated(heads, angles, interleaved, first)
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-14)
    dy = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    ours, theirs = (torch.autograd.grad(y, heads, dy)[0] for y in (found, expected))
    assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-14)


def test_angles_in_float32_leave_one_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(64, 2, 3, 16, generator=generator).bfloat16().requires_grad_()
    angles = 100.0 * torch.rand(64, 1, 1, 8, dtype=torch.float64, generator=generator)
    rotation = Rotation(angles.cos().float(), angles.sin().float())
    exact = rotated(heads.detach().double(), angles, False, 0)
    back = rotated(exact.bfloat16().double(), -angles, False, 0)
    found = apply_rope(heads, rotation)
    (gradient,) = torch.autograd.grad(found, heads, exact.bfloat16())
    assert torch.equal(found, exact.bfloat16())
    assert torch.equal(gradient, back.bfloat16())
