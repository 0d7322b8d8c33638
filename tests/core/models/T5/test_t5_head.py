"""The head of T5 with a borrowed weight. `test_t5_model` has the names, tests/parity copies on other stages."""

import torch
from torch import nn

from megatron.core.models.T5.t5_head import T5LMHead
from megatron.core.transformer.transformer_config import TransformerConfig

CONFIG = TransformerConfig(num_layers=1, hidden_size=6, num_attention_heads=2, fp64=True, use_cpu_initialization=True)


def test_a_borrowed_weight_is_read_and_not_kept() -> None:
    table = nn.Parameter(torch.randn(11, 6, dtype=torch.float64))
    head = T5LMHead(CONFIG, True, 11, True, table)
    assert [name for name, _ in head.named_parameters()] == ["output_layer.bias"]
    hidden = torch.randn(3, 2, 6, dtype=torch.float64)
    expected = (hidden @ table.t() + head.output_layer.bias).transpose(0, 1)
    torch.testing.assert_close(head(hidden), expected, rtol=1e-12, atol=1e-12)
