"""Experts of one rank against a loop over rows."""

from typing import Any

import pytest
import torch
from support.tiny_models import randomize, tiny_config

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, local_experts
from megatron.core.transformer.transformer_config import TransformerConfig

SIZES = [2, 0, 3]


def config(**fields: Any) -> TransformerConfig:
    sizes = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1}
    return tiny_config(**sizes, num_moe_experts=3, moe_ffn_hidden_size=6, **fields)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("kind", [SequentialMLP, GroupedMLP])
def test_each_expert_computes_its_rows_and_weights_multiply_inside(kind: Any, on_input: bool) -> None:
    settings = {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True}
    experts = kind(3, config(**(settings if on_input else {})))
    randomize(experts)
    rows, weights = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    found = experts(rows, weights, RowGroups(torch.tensor(SIZES)))
    state, expected = experts.state_dict(), []
    for number, expert in enumerate([0, 0, 2, 2, 2]):
        grouped = kind is GroupedMLP
        names = [
            f"linear_{which}.{name}{expert}" if grouped else f"local_experts.{expert}.linear_{which}.{name}"
            for which in ("fc1", "fc2")
            for name in ("weight", "bias")
        ]
        w1, b1, w2, b2 = (state[name] for name in names)
        before, inside = (weights[number], 1.0) if on_input else (1.0, weights[number])
        activated = torch.nn.functional.gelu(w1 @ (rows[number] * before) + b1)
        expected.append(inside * (w2 @ activated + b2))
    torch.testing.assert_close(found, torch.stack(expected))


def test_an_expert_without_rows_has_gradients_of_zero() -> None:
    experts = SequentialMLP(3, config())
    rows = torch.randn(5, 4, dtype=torch.float64)
    experts(rows, torch.ones(5, dtype=torch.float64), RowGroups(torch.tensor(SIZES))).sum().backward()
    idle = list(experts.local_experts[1].parameters())
    assert idle and all(parameter.grad is not None and not parameter.grad.any() for parameter in idle)


def test_ranks_have_experts_in_order() -> None:
    groups = ProcessGroupCollection.from_grid(RankGrid(4, expert=4), 2)
    assert local_experts(3, groups) == range(6, 9)
