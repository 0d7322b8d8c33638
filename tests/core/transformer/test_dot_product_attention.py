"""Masks that a layer of attention hands to its kernel."""

from unittest import mock

import torch

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_inputs import plain_causal_mask
from megatron.core.transformer.transformer_config import TransformerConfig


def test_a_causal_layer_does_not_read_a_mask_of_later_tokens() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.0)
    query, key, value = torch.randn(3, 6, 2, 2, 8, generator=torch.Generator().manual_seed(1))
    mask = plain_causal_mask((2, 1, 6, 6), query.device)
    for kind, reads in ((AttnMaskType.causal, False), (AttnMaskType.no_mask, True)):
        layer = DotProductAttention(config, 1, kind, "self")
        masks = []
        with mock.patch.object(layer, "plan", wraps=layer.plan) as plan:
            output = layer(query, key, value, mask)
            masks += [call.args[1].mask for call in plan.kernel_of.call_args_list]
        assert [found is not None for found in masks] == [reads]
        torch.testing.assert_close(output, layer(query, key, value, mask.clone()))
