"""Stacked weights of experts: boxes and state dicts. `test_experts` has their products."""

from typing import Any

import torch
from support.tiny_models import tiny_config

from megatron.core.backends import choose_backend
from megatron.core.communication.collectives import PlannedGroup
from megatron.core.initializers import Normal
from megatron.core.parameters import Box, info_of
from megatron.core.transformer.moe.grouped_weights import GroupedLinear


def linear(rank: int = 0, ranks: int = 1, **fields: Any) -> GroupedLinear:
    config = tiny_config(hidden_size=4, num_moe_experts=6)
    group = PlannedGroup(tuple(range(ranks)), rank) if ranks > 1 else None
    keywords = {"init_method": Normal(1.0), "bias": True, "splits_inputs": False, "tp_group": group} | fields
    return GroupedLinear(config, range(2, 4), 4, (2, 6), backend=choose_backend(config), **keywords)


def test_ranks_divide_the_channels_of_each_expert() -> None:
    outputs, inputs = linear(1, 2), linear(1, 2, splits_inputs=True)
    assert info_of(outputs.weight).box == Box((2, 0, 3, 0), (2, 2, 3, 4)) and outputs.weight.shape == (2, 6, 4)
    assert info_of(inputs.weight).box == Box((2, 0, 0, 2), (2, 2, 6, 2)) and inputs.weight.shape == (2, 12, 2)
    assert outputs.adds_bias and not inputs.adds_bias and linear(0, 2, splits_inputs=True).adds_bias


def test_a_state_dict_has_each_expert_apart() -> None:
    made, other = linear(), linear()
    state = made.state_dict()
    assert set(state) == {"weight0", "weight1", "bias0", "bias1"} and torch.equal(state["weight1"], made.weight[1])
    other.load_state_dict({**state, "_extra_state": None})
    assert torch.equal(other.weight, made.weight)
