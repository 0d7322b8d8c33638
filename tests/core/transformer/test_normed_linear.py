"""A layer whose spec names Transformer Engine's fused linear layers computes what ours does."""

import pytest
import torch

from megatron.core.extensions.transformer_engine import (  # type: ignore[import-not-found]
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.normed_linear import NormedColumnParallelLinear


def fused_spec() -> ModuleSpec:
    """Written from Megatron-LM's documentation, as users' specs are."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=TELayerNormColumnParallelLinear,
                    core_attention=TEDotProductAttention,
                    linear_proj=TERowParallelLinear,
                    q_layernorm=TENorm,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=TELayerNormColumnParallelLinear, linear_fc2=TERowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


@pytest.mark.parametrize("norm", [{"normalization": "RMSNorm"}, {"layernorm_zero_centered_gamma": True}])
def test_a_spec_of_fused_layers(norm: dict[str, object]) -> None:
    settings = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "gated_linear_unit": True, **norm}
    config = TransformerConfig(**settings, params_dtype=torch.float64, hidden_dropout=0.0, attention_dropout=0.0)
    spec = fused_spec()
    spec.submodules.self_attention.submodules.q_layernorm = IdentityOp
    fused = GPTModel(config, spec, 32, 8)
    ours = GPTModel(config, get_gpt_layer_local_spec(), 32, 8)
    assert isinstance(fused.decoder.layers[0].mlp.linear_fc1, NormedColumnParallelLinear)
    state = ours.state_dict()
    for name, tensor in fused.state_dict().items():
        local = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        source = state[local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")]
        source += torch.linspace(0.0, 0.1, source.numel(), dtype=torch.float64).view(source.shape)
        tensor.copy_(source)
    tokens = torch.randint(32, (2, 8))
    positions = torch.arange(8)[None]
    found, expected = (model(tokens, positions, None, labels=tokens) for model in (fused, ours))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)
    found.sum().backward()
    expected.sum().backward()
    gradients = [
        model.decoder.layers[0].self_attention.linear_qkv.weight.grad
        for model in (fused, ours)  # type: ignore[union-attr]
    ]
    torch.testing.assert_close(*gradients, rtol=0.0, atol=1e-12)
    assert fused.decoder.layers[0].self_attention.linear_qkv.layer_norm_weight.grad.abs().sum() > 0  # type: ignore
