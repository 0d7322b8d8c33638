"""Masked tokens are filled with the most likely ones, which do not depend on the other rows."""

import torch

from megatron.core.inference.mask_filling import fill_masks
from megatron.core.models.bert import BertModel
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

MASK = 3


@torch.no_grad()
def test_every_mask_gets_the_most_likely_token() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, fp64=True, init_method_std=0.5)
    for types in (0, 2):
        model = BertModel(config, types, bert_layer_local_spec, 23, 8, add_binary_head=bool(types)).eval()
        rows = [[1, MASK, 7, 9, MASK, 2], [1, 5, 2], [1, 4, MASK, 2]]
        filled = fill_masks(model, rows, MASK)
        for row, found in zip(rows, filled, strict=True):
            ids = torch.tensor([row])
            logits, _ = model(ids, None, torch.zeros_like(ids) if types else None)
            logits[..., MASK] = -torch.inf
            likely = logits[0].argmax(-1).tolist()
            assert found == [best if token == MASK else token for token, best in zip(row, likely, strict=True)]
            assert MASK not in found
