"""The convolution's parameters: their boxes and their initial values."""

import torch

from megatron.core.ops.causal_conv import causal_conv
from megatron.core.parameters import Box, info_of
from megatron.core.transformer.causal_conv1d import CausalConv1d
from megatron.core.transformer.transformer_config import TransformerConfig


def test_parameters_and_result() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, fp64=True)
    conv = CausalConv1d(config, (2, 3), 4, bias=True)
    assert conv.weight.shape == (6, 4) and conv.bias is not None and conv.bias.shape == (6,)
    assert info_of(conv.weight).box == Box.whole((2, 3, 4)) and info_of(conv.bias).box == Box.whole((2, 3))
    assert conv.weight.abs().max() <= 0.5 and conv.weight.abs().max() > 0.4 and not conv.bias.any()
    x, document = torch.randn(5, 1, 6, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 1])
    assert torch.equal(conv(x, document), causal_conv(x, conv.weight, conv.bias, document))
    assert CausalConv1d(config, (2, 3), 4).bias is None
    # Its rows are no matrix: muP leaves its learning rate alone, and Muon its updates.
    assert info_of(conv.weight).decays and not info_of(conv.weight).grows_with_width
