"""Specs of GPT layers: what stands where, by config."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_inference_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import get_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.warn import _warn_once


def config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, **fields})


@pytest.mark.parametrize(
    ("placement", "norms"),
    [("pre", "1010"), ("post", "0101"), ("sandwich", "1111"), ("parallel", "1000"), ("parallel_two_norms", "1010")],
)
def test_norms_stand_where_the_placement_says(placement: str, norms: str) -> None:
    parts = get_gpt_layer_local_spec(norm_placement=placement).submodules
    places = (parts.input_layernorm, parts.post_attention_layernorm, parts.pre_mlp_layernorm, parts.post_mlp_layernorm)
    assert "".join("0" if place is IdentityOp else "1" for place in places) == norms


def test_a_stage_has_its_layers_each_of_its_kind() -> None:
    experts = {"num_moe_experts": 4, "moe_layer_freq": [0, 1, 0, 1], "pipeline_model_parallel_size": 2}
    for rank in (0, 1):
        spec = get_gpt_decoder_block_spec(config(**experts), use_transformer_engine=False, pp_rank=rank)
        kinds = [get_module(layer.submodules.mlp) for layer in spec.layer_specs]
        assert kinds == [MLP, MoELayer]


def test_prediction_layers_stand_on_the_last_stage_alone() -> None:
    predicting = config(mtp_num_layers=2, pipeline_model_parallel_size=2)
    layers = get_gpt_layer_local_spec()
    assert get_gpt_mtp_block_spec(predicting, layers, use_transformer_engine=False, pp_rank=0) is None
    spec = get_gpt_mtp_block_spec(predicting, layers, use_transformer_engine=False, pp_rank=1)
    assert spec is not None and len(spec.submodules.layer_specs) == 2


def test_what_is_not_there_yet_is_refused() -> None:
    with pytest.raises(UserError, match="not yet: use_kitchen True in a layer spec"):
        get_gpt_layer_local_spec(use_kitchen=True)
    with pytest.raises(UserError, match="not yet: use_te_op_fuser True"):
        get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=True)
    with pytest.raises(UserError, match="get_gpt_layer_local_spec generates too"):
        get_gpt_layer_with_inference_spec()


def test_specs_of_transformer_engines_layers_are_ours(caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    assert get_gpt_layer_with_transformer_engine_spec(4, False, True) == get_gpt_layer_local_spec(4, False, True)
    get_gpt_layer_local_spec(None, False, False, False, "gdn")  # what two releases pass by mistake
    assert [record.getMessage().split(":")[0].split(" in ")[0] for record in caplog.records] == [
        "layer specs of Transformer Engine",
        "fp8='gdn'",
    ]
    config = TransformerConfig(num_layers=3, hidden_size=8, num_attention_heads=2)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    assert block.layer_specs == get_gpt_decoder_layer_specs(config, False) and len(block.layer_specs) == 3
    assert len(caplog.records) == 2
