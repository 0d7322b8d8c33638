"""What a router cannot be made of is said before one is made."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.router import validate
from megatron.core.transformer.moe.router import TopKRouter, routing_rule
from megatron.core.transformer.transformer_config import TransformerConfig

SIGMOID = {"moe_router_score_function": "sigmoid"}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}


def config(**fields: Any) -> TransformerConfig:
    base = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_moe_experts": 8}
    return TransformerConfig(**base | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_router_topk": 9}, "moe_router_topk 9 must be from 1 to num_moe_experts 8"),
        ({"moe_router_topk": 0}, "moe_router_topk 0 must be from 1"),
        ({"moe_router_topk": 1}, "teaches the router nothing; set moe_router_pre_softmax"),
        ({"moe_router_norm_topk_prob": False}, "sums to 1; set moe_router_pre_softmax"),
        ({"moe_router_enable_expert_bias": True}, "needs moe_router_score_function sigmoid or moe_router_pre_softmax"),
        ({"moe_z_loss_coeff": -1.0}, "moe_z_loss_coeff -1.0 must be at least 0"),
        ({"moe_input_jitter_eps": float("nan")}, "moe_input_jitter_eps nan must be at least 0"),
        ({"moe_router_topk_limited_devices": 2}, "set moe_router_num_groups to that number"),
        (GROUPS | {"moe_router_num_groups": None}, "moe_router_num_groups and moe_router_group_topk 2 go together"),
        (GROUPS | {"moe_router_num_groups": 3}, "3 does not divide num_moe_experts 8; use 2"),
        (GROUPS | {"moe_router_group_topk": 5}, "moe_router_group_topk 5 must be from 1 to moe_router_num_groups 4"),
        (GROUPS | {"moe_router_topk": 5}, "more than the 4 experts of moe_router_group_topk 2 groups"),
        (GROUPS | {"moe_router_group_topk": 3, "moe_router_topk": 2}, "set moe_router_group_score_topk 1"),
        (GROUPS | {"moe_router_group_score_topk": 3}, "moe_router_group_score_topk 3: a group has 2 experts"),
        ({"moe_router_group_score_topk": 2}, "needs moe_router_num_groups"),
        ({"moe_aux_loss_coeff": [0.1, 0.2]}, "one number for each of moe_router_load_balancing_type aux_loss"),
        ({"moe_aux_loss_coeff": -0.1}, "moe_aux_loss_coeff -0.1 must be at least 0"),
        ({"moe_router_load_balancing_type": ["aux_loss", "aux_loss"]}, "has a type twice"),
        ({"moe_router_load_balancing_type": ["aux_loss", "none"]}, "only losses go together"),
        (SINKHORN | {"moe_aux_loss_coeff": 0.1}, "sinkhorn has no loss"),
        (SINKHORN | SIGMOID, "moe_router_score_function sigmoid does not go with"),
        (SINKHORN | {"moe_router_topk_scaling_factor": 2.0}, "moe_router_topk_scaling_factor 2.0 does not go with"),
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor 0.0 must be more than 0"),
        ({"moe_pad_expert_input_to_capacity": True}, "needs moe_expert_capacity_factor"),
    ],
)
def test_impossible_routers_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        config(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        GROUPS,
        GROUPS | {"moe_router_group_topk": 3, "moe_router_topk": 2, "moe_router_group_score_topk": 1},
        SIGMOID | {"moe_router_topk": 1, "moe_router_enable_expert_bias": True},
        {"moe_router_pre_softmax": True, "moe_router_enable_expert_bias": True},
        SINKHORN | {"moe_router_topk": 1},
        {"moe_router_pre_softmax": True, "moe_router_topk": 1, "moe_router_norm_topk_prob": False},
        {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.0]},
        {"moe_expert_capacity_factor": -1.0},
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    ],
)
def test_what_is_possible_makes_a_router(fields: dict[str, Any]) -> None:
    TopKRouter(config(**fields), layer_number=1)


def test_without_experts_nothing_of_it_is_looked_at() -> None:
    assert not list(validate(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)))
    TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, moe_router_topk=0)


def test_what_is_left_open_follows_from_the_score_function() -> None:
    assert not routing_rule(config()).renormalises
    assert routing_rule(config(**SIGMOID)).renormalises
    assert not routing_rule(config(**SIGMOID, moe_router_topk=1)).renormalises
    assert not routing_rule(config(**SIGMOID, moe_router_norm_topk_prob=False)).renormalises
    assert routing_rule(config(moe_router_pre_softmax=True, moe_router_norm_topk_prob=True)).renormalises
    assert routing_rule(config(**GROUPS)).group_score_of == 2
    assert routing_rule(config(**GROUPS, moe_router_group_score_topk=1)).group_score_of == 1
