"""The definition of Mamba-2's recurrence against closed forms."""

import torch

from megatron.core.ops.ssd.recurrent import ssd_recurrent


def test_without_decay_the_state_sums_what_was_added() -> None:
    x = torch.arange(1.0, 6.0, dtype=torch.float64).view(5, 1, 1, 1)
    one = torch.ones(5, 1, 1, 1, dtype=torch.float64)
    output, state = ssd_recurrent(x, one[..., 0], torch.zeros(1), one, 2 * one)
    assert output.flatten().tolist() == [2.0, 6.0, 12.0, 20.0, 30.0] and state.item() == 15.0
    output, state = ssd_recurrent(x, one[..., 0], torch.zeros(1), one, one, torch.tensor([0, 0, 1, 1, 1]))
    assert output.flatten().tolist() == [1.0, 3.0, 3.0, 7.0, 12.0] and state.item() == 12.0


def test_a_constant_decay_is_a_geometric_series() -> None:
    one = torch.ones(6, 1, 2, 1, dtype=torch.float64)
    step = torch.full((6, 1, 2), 0.5, dtype=torch.float64)
    rate = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    output, _ = ssd_recurrent(one, step, rate, one[:, :, :1], one[:, :, :1])
    for head, factor in enumerate((0.5 * rate).exp()):
        expected = torch.stack([0.5 * (1 - factor ** (t + 1)) / (1 - factor) for t in range(6)])
        torch.testing.assert_close(output[:, 0, head, 0], expected)
