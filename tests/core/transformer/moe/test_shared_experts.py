"""Shared experts: one MLP of their joint width, and its gate."""

from typing import Any

import pytest
import torch

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig


@pytest.mark.parametrize("gated", [False, True])
def test_the_gate_multiplies_the_output_and_halves_make_the_whole(gated: bool) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=2,
        moe_shared_expert_intermediate_size=6,
        moe_shared_expert_gate=gated,
        fp64=True,
        use_cpu_initialization=True,
    )
    made: Any = SharedExpertMLP(config, MLPSubmodules(ColumnParallelLinear, linear_fc2=RowParallelLinear))
    x = torch.randn(3, 4, dtype=torch.float64)
    inner = torch.nn.functional.gelu(x @ made.linear_fc1.weight.t() + made.linear_fc1.bias)
    expected = inner @ made.linear_fc2.weight.t() + made.linear_fc2.bias
    assert made.linear_fc1.weight.shape == (6, 4) and (made.gate_weight is not None) is gated
    if gated:
        expected = expected * torch.sigmoid(x @ made.gate_weight.t())
    torch.testing.assert_close(made(x), expected)
    assert torch.equal(made.second_half(x, made.first_half(x)), made(x))
