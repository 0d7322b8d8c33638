"""The specs of a hybrid model's layers are those of its letters."""

import pytest

from megatron.core.exceptions import UserError
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mamba_mixer import MambaMixer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import get_module
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**settings) -> TransformerConfig:
    return TransformerConfig(hidden_size=16, num_attention_heads=2, mamba_head_dim=4, **settings)


def test_each_letter_is_a_layer_of_one_branch() -> None:
    layers = hybrid_stack_spec(config(hybrid_layer_pattern="M*-E", num_moe_experts=2)).layer_specs
    assert layers is not None
    parts = [(get_module(one.submodules.self_attention), get_module(one.submodules.mlp)) for one in layers]
    nothing = IdentityOp
    assert parts == [(MambaMixer, nothing), (SelfAttention, nothing), (nothing, MLP), (nothing, MoELayer)]
    norms = [(one.submodules.input_layernorm, one.submodules.pre_mlp_layernorm) for one in layers]
    assert [tuple(norm is IdentityOp for norm in pair) for pair in norms] == [(False, True)] * 2 + [(True, False)] * 2


def test_another_model_is_refused() -> None:
    with pytest.raises(UserError, match="the model is not hybrid; give hybrid_layer_pattern, or is_hybrid_model"):
        hybrid_stack_spec(config(num_layers=2))
