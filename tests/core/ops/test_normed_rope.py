"""RMSNorm and rotary positions of heads as one operation."""

import torch

from megatron.core.ops.norm import rms_norm
from megatron.core.ops.normed_rope import normed_rope
from megatron.core.ops.rope import Rotation, apply_rope


def test_it_is_the_norm_and_then_the_rotation() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, weight = (torch.randn(shape, generator=generator) for shape in ((5, 2, 3, 8), (8,)))
    angle = torch.randn(5, 1, 1, 4, generator=generator)
    rotation = Rotation(angle.cos(), angle.sin())
    found = normed_rope(heads, weight, 1e-5, True, rotation)
    assert torch.equal(found, apply_rope(rms_norm(heads, weight, 1e-5, True), rotation))
    # Rotation keeps the norm of a head, so a head has the root mean square of weights of one.
    plain = normed_rope(heads, torch.ones(8), 0.0, False, rotation)
    torch.testing.assert_close(plain.square().mean(-1), torch.ones(5, 2, 3))
