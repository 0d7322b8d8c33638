"""The gate of attention's output."""

import torch

from megatron.core.ops.attention.output_gate import gate_output


def test_each_channel_has_a_gate_of_its_own() -> None:
    context = torch.arange(1.0, 13.0).view(1, 1, 12)
    gate = torch.full((1, 1, 2, 6), 50.0)  # open
    gate[0, 0, 1, 2] = -50.0
    expected = context.clone()
    expected[0, 0, 8] = 0.0
    torch.testing.assert_close(gate_output(context, gate), expected)
    assert torch.equal(gate_output(context, torch.zeros(1, 1, 2, 6)), context / 2)
