"""A router of a user's own in a layer of experts."""

import pytest
import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig

CONFIG = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=4, moe_router_topk=2, add_bias_linear=False
)


class PlainRouter(Router):
    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return topk_routing_with_score_function(logits.flatten(0, -2), self.topk)


def layer(submodules: MoESubmodules | None = None) -> MoELayer:
    made = MoELayer(CONFIG, submodules)
    name_parameters(made)
    initialize_parameters(made, 1)
    return made


def test_it_routes_as_our_own_router_with_the_same_formula() -> None:
    own, ours = layer(MoESubmodules(router=PlainRouter)), layer()
    assert isinstance(own.router, PlainRouter)
    hidden = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    output, _ = own(hidden)
    assert torch.allclose(output, ours(hidden)[0], atol=1e-6)
    output.sum().backward()
    assert own.router.weight.grad is not None and own.router.weight.grad.abs().sum() > 0


def test_what_a_router_lacks_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"Router has no method routing\(logits\)"):
        Router(CONFIG)(torch.zeros(1, 1, 8))
    with pytest.raises(UserError, match="padding_mask"):
        PlainRouter(CONFIG)(torch.zeros(1, 1, 8), torch.zeros(1, 1, dtype=torch.bool))
