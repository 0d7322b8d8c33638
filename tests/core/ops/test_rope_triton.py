"""The Triton kernel of rotary positions, in Triton's interpreter."""

import torch
from support import elementwise_kernels

from megatron.core.ops.rope import Rotation
from megatron.core.ops.rope_triton import apply_rope_triton


def test_the_kernel_agrees_with_its_reference() -> None:
    elementwise_kernels.positions()


def test_angles_in_float32_leave_one_rounding() -> None:
    device = elementwise_kernels.DEVICE
    angle = torch.full((1, 1, 1, 1), torch.pi / 4 + 1e-3, device=device)
    heads = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16, device=device)
    turned = apply_rope_triton(heads, Rotation(angle.cos(), angle.sin()))
    # cos - sin: almost nothing is left of two rounded numbers.
    assert abs(turned[..., 0].item() + 1.4142e-3) < 2e-5
