"""The transform before the output layer."""

import torch
from torch.nn.functional import gelu, layer_norm

from megatron.core.models.bert.bert_lm_head import BertLMHead
from megatron.core.transformer.transformer_config import TransformerConfig


def test_norm_of_the_exact_gelu_of_a_linear_layer() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, fp64=True, layernorm_epsilon=0.1)
    head = BertLMHead(8, config)
    hidden = torch.randn(5, 3, 8, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
        norm = head.layer_norm
        activated = gelu(hidden @ head.dense.weight.t() + head.dense.bias)
        expected = layer_norm(activated, (8,), norm.weight, norm.bias, 0.1)
        torch.testing.assert_close(head(hidden), expected, rtol=1e-10, atol=1e-10)
