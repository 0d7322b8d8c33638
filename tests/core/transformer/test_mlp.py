"""The MLP of a layer by itself; `test_gpt_model` compares its activations with formulas."""

import torch
from support.tiny_models import tiny_config

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP, MLPSubmodules


def test_mlp_by_itself() -> None:
    config = tiny_config()
    spec = get_gpt_layer_local_spec().submodules.mlp.submodules
    mlp = MLP(config, MLPSubmodules(spec.linear_fc1, linear_fc2=spec.linear_fc2), input_size=8, ffn_hidden_size=12)
    assert mlp.linear_fc1.weight.shape == (12, 8) and mlp.linear_fc2.weight.shape == (16, 12)
    output, bias = mlp(torch.ones(3, 8, dtype=torch.float64), per_token_scale=torch.tensor([1.0, 0.0, 2.0]))
    assert bias is mlp.linear_fc2.bias and not output[1].any() and torch.allclose(output[2], output[0] * 2)
