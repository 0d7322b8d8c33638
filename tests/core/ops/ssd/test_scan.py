"""The scan of a Mamba-2 layer against the recurrence token by token."""

import torch
import torch.nn.functional as F
from support.recurrent_kernels import scan_arguments

from megatron.core.ops.ssd.recurrent import ssd_recurrent
from megatron.core.ops.ssd.scan import mamba_scan, mamba_scan_with_state

SIZES = {"head_dim": 4, "state_dim": 5, "min_step": 0.4}


def test_step_sizes_rates_and_the_skip() -> None:
    mixed, step, bias, log_rate, skip = scan_arguments(9, 2, 2, 3, 4, 5, torch.float64)
    step = step[..., :3]
    found = mamba_scan(mixed, step, bias, log_rate, skip, **SIZES)
    x, b, c = mixed.split([12, 5, 5], -1)
    sizes = F.softplus(step.flatten(2) + bias).clamp(min=0.4)
    assert 0 < (sizes == 0.4).sum() < sizes.numel()
    heads = x.reshape(9, 2, 6, 4)
    expected, _ = ssd_recurrent(heads, sizes, -log_rate.exp(), b, c)
    torch.testing.assert_close(found, (expected + skip[:, None] * heads).view_as(x), rtol=1e-11, atol=1e-11)


def test_a_state_carries_a_row_on_and_padding_does_not_change_it() -> None:
    mixed, step, *vectors = scan_arguments(9, 2, 2, 3, 4, 5, torch.float64)
    step = step[..., :3]
    whole, last = mamba_scan_with_state(mixed, step, *vectors, **SIZES)
    _, state = mamba_scan_with_state(mixed[:4], step[:4], *vectors, **SIZES)
    rest = torch.cat([mixed[4:], mixed[:2]]), torch.cat([step[4:], step[:2]])  # two tokens of padding
    ended = (torch.arange(7) >= 5)[:, None, None].expand(7, 2, 1)
    found, end = mamba_scan_with_state(*rest, *vectors, state=state, ended=ended, **SIZES)
    torch.testing.assert_close(found[:5], whole[4:], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(end, last, rtol=1e-11, atol=1e-11)
