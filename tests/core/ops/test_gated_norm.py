"""RMSNorm with a gate against its formula."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.gated_norm import gated_rms_norm


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("shape", [(5, 2, 3, 8), (5, 2, 3, 4, 8)])
def test_it_is_torchs_norm(shape: tuple[int, ...], gate_first: bool) -> None:
    x, z, w = (torch.randn(size, dtype=torch.float64) for size in (shape, shape, shape[-1:]))
    found = gated_rms_norm(x, z, w, 1e-3, gate_first)
    if gate_first:
        expected = F.rms_norm(x * F.silu(z), shape[-1:], w, 1e-3)
    else:
        expected = F.rms_norm(x, shape[-1:], w, 1e-3) * F.silu(z)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 2, 3, 8), (5, 2, 3, 4, 8)])
def test_groups_can_have_weights_of_their_own(shape: tuple[int, ...]) -> None:
    x, z, w = (torch.randn(size, dtype=torch.float64) for size in (shape, shape, (3, 8)))
    found = gated_rms_norm(x, z, w, 1e-3, True)
    for group in range(3):
        expected = gated_rms_norm(x[:, :, group, None], z[:, :, group, None], w[group], 1e-3, True)
        torch.testing.assert_close(found[:, :, group, None], expected, rtol=1e-12, atol=1e-12)
