"""RMSNorm over a group of one rank is the ordinary one; over several ranks tests of layers compare it."""

import pytest
import torch

from megatron.core.ops.norm import rms_norm
from megatron.core.ops.norm_over_ranks import rms_norm_over_ranks


@pytest.mark.parametrize("zero_centered", [False, True])
def test_one_rank_uses_the_weights_from_its_first(zero_centered: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    w = torch.randn(7, dtype=torch.float64, generator=generator)
    x.requires_grad_()
    w.requires_grad_()
    found = rms_norm_over_ranks(x, w, 1e-5, zero_centered, None, 2)
    expected = rms_norm(x, w[2:6], 1e-5, zero_centered)
    assert torch.allclose(found, expected, rtol=1e-13)
    gradients = (torch.autograd.grad(y, (x, w), dy) for y in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
