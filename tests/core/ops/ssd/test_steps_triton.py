"""Step sizes and decays of Mamba-2, in Triton's interpreter."""

import math

import torch
import torch.nn.functional as F
from support.recurrent_kernels import scan_arguments

from megatron.core.ops.ssd.steps_triton import sizes_and_sums


def test_sizes_and_sums_of_decays_begin_anew_in_each_chunk() -> None:
    _, step, bias, log_rate, _ = scan_arguments(11, 2, 2, 3, 4, 5, torch.float32)
    step = step[..., :3] * 10 - 5  # from very small step sizes to large ones
    sizes, sums = sizes_and_sums(step, bias, log_rate, 0.0, 4)
    expected = F.softplus(step.flatten(2).double() + bias.double()).permute(1, 2, 0)
    torch.testing.assert_close(sizes[..., :11].double(), expected, rtol=2e-6, atol=0.0)
    assert sizes.shape == (2, 6, 12) and not sizes[..., 11].any()
    decays = F.pad(expected * -log_rate.double().exp()[:, None], (0, 1)).view(2, 6, 3, 4)
    wanted = decays.cumsum(-1).flatten(2) / math.log(2.0)
    torch.testing.assert_close(sums.double(), wanted, rtol=2e-6, atol=0.0)
