"""Layers of BERT: those of GPT, seen from both sides, as many as a stage has."""

import pytest
import torch

from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    bert_layer_with_transformer_engine_spec,
    get_bert_encoder_block_spec,
)
from megatron.core.tokens import Tokens
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@pytest.mark.parametrize("spec", [bert_layer_local_spec, bert_layer_with_transformer_engine_spec])
def test_a_token_attends_to_both_sides(spec: object) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, fp64=True, hidden_dropout=0.0, attention_dropout=0.0
    )
    layer = build_module(spec, config=config, layer_number=1)  # type: ignore[arg-type]
    assert layer.self_attention.core_attention.attn_mask_type is AttnMaskType.padding
    hidden = torch.randn(4, 8, dtype=torch.float64)
    later = hidden.clone()
    later[3] += torch.arange(8.0)
    inputs = LayerInputs(Tokens(4, 1))
    assert (layer(later, inputs)[0] - layer(hidden, inputs)[0]).abs().max() > 1e-9


def test_a_stage_has_its_layers() -> None:
    config = TransformerConfig(
        num_layers=6, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=3, pipeline_dtype=torch.float32
    )
    for rank in range(3):
        specs = get_bert_encoder_block_spec(config, pp_rank=rank).layer_specs
        assert specs is not None and len(specs) == 2
