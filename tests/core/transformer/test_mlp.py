"""The MLP of a layer."""

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP, MLPSubmodules, activation_of
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**settings) -> TransformerConfig:
    settings = {"fp64": True, "hidden_dropout": 0.0, "attention_dropout": 0.0} | settings
    return TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, **settings
    )


def test_mlp_by_itself() -> None:
    spec = get_gpt_layer_local_spec().submodules.mlp.submodules
    mlp = MLP(config(), MLPSubmodules(spec.linear_fc1, linear_fc2=spec.linear_fc2), input_size=8, ffn_hidden_size=12)
    assert mlp.linear_fc1.weight.shape == (12, 8) and mlp.linear_fc2.weight.shape == (16, 12)
    output, bias = mlp(torch.ones(3, 8, dtype=torch.float64), per_token_scale=torch.tensor([1.0, 0.0, 2.0]))
    assert bias is mlp.linear_fc2.bias and not output[1].any() and torch.allclose(output[2], output[0] * 2)


@pytest.mark.parametrize("gated", [False, True])
def test_a_gated_activation_reads_two_halves(gated: bool) -> None:
    spec = get_gpt_layer_local_spec().submodules.mlp.submodules
    mlp = MLP(config(gated_linear_unit=gated, add_bias_linear=False), spec)
    x = torch.randn(3, 16, dtype=torch.float64)
    inner = x @ mlp.linear_fc1.weight.t()
    if gated:
        gate, up = inner.chunk(2, -1)
        inner = torch.nn.functional.gelu(gate) * up
    else:
        inner = torch.nn.functional.gelu(inner)
    output, bias = mlp(x)
    torch.testing.assert_close(output, inner @ mlp.linear_fc2.weight.t())
    assert bias is None and activation_of(config(gated_linear_unit=gated)).gated is gated
