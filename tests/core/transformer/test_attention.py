"""Self-attention of one rank, and how ranks divide query groups."""

from typing import Any

import pytest
import torch

from megatron.core.collectives import PlannedGroup
from megatron.core.exceptions import UserError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tokens import Tokens
from megatron.core.transformer.attention import SelfAttention, groups_of_rank
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

INPUTS = LayerInputs(Tokens(3, 2))


def attention(**fields: Any) -> Any:
    settings = {"num_query_groups": 2, "fp64": True, "use_cpu_initialization": True, **fields}
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, **settings)
    return build_module(get_gpt_layer_local_spec().submodules.self_attention, config=config, layer_number=1).eval()


def test_rows_of_the_projection_lie_by_group() -> None:
    made = attention()
    assert isinstance(made, SelfAttention)
    hidden = torch.randn(6, 16, dtype=torch.float64)
    query, key, value = made.get_query_key_value_tensors(hidden, INPUTS)
    rows = (hidden @ made.linear_qkv.weight.t() + made.linear_qkv.bias).view(3, 2, 2, 4, 4)  # group, heads, channels
    assert torch.equal(query, rows[..., :2, :].flatten(2, 3)) or torch.allclose(query, rows[..., :2, :].flatten(2, 3))
    torch.testing.assert_close(key, rows[..., 2, :])
    torch.testing.assert_close(value, rows[..., 3, :])


def test_a_gate_multiplies_what_attention_gives() -> None:
    made, hidden = attention(attention_output_gate=True), torch.randn(6, 16, dtype=torch.float64)
    with torch.no_grad():
        made.linear_qkv.weight.view(2, 6, 4, 16)[:, 2:4] = 0.0  # gates come after a group's two queries
        half, bias = made(hidden, INPUTS)
        plain = attention()
        plain.linear_qkv.weight.view(2, 4, 4, 16).copy_(made.linear_qkv.weight.view(2, 6, 4, 16)[:, [0, 1, 4, 5]])
        plain.linear_proj.weight.copy_(made.linear_proj.weight)
        torch.testing.assert_close(half, plain(hidden, INPUTS)[0] / 2)  # sigmoid(0)
    assert bias is made.linear_proj.bias


@pytest.mark.parametrize(("groups", "ranks", "held"), [(8, 2, 4), (2, 8, 1), (1, 4, 1)])
def test_ranks_divide_groups_or_share_them(groups: int, ranks: int, held: int) -> None:
    assert groups_of_rank(groups, PlannedGroup(tuple(range(ranks)), 0)) == held


def test_groups_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(UserError, match="6"):
        groups_of_rank(6, PlannedGroup((0, 1, 2, 3), 0))
