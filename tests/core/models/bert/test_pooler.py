"""tanh of a transform of the first token."""

import torch

from megatron.core.models.bert.pooler import Pooler
from megatron.core.transformer.transformer_config import TransformerConfig


def test_the_first_token_of_each_row_alone() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, fp64=True)
    pooler = Pooler(8, config)
    hidden = torch.randn(5, 3, 8, dtype=torch.float64)
    with torch.no_grad():
        for parameter in pooler.parameters():
            parameter.copy_(torch.randn_like(parameter))
        expected = torch.tanh(hidden[0] @ pooler.dense.weight.t() + pooler.dense.bias)
        torch.testing.assert_close(pooler(hidden), expected, rtol=1e-12, atol=1e-12)
        changed = hidden.clone()
        changed[1:] += 1.0
        assert torch.equal(pooler(changed), pooler(hidden))
