"""A router of a user's own in a layer of experts."""

import pytest
import torch
from torch import Tensor

from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig

CONFIG = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=4, moe_router_topk=2, add_bias_linear=False
)


class PlainRouter(Router):
    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weights, chosen = topk_routing_with_score_function(logits.flatten(0, -2), self.topk)
        if padding_mask is not None:
            chosen = chosen & ~padding_mask.reshape(-1, 1)
        return weights * chosen, chosen


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


def test_padding_reaches_a_router_of_ones_own() -> None:
    own, ours = layer(MoESubmodules(router=PlainRouter)), layer()
    hidden, mask = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(3, 5).bool()
    mask[1, 2:] = True
    inputs = LayerInputs(Tokens(5, 3), padding_mask=mask)
    output = own(hidden, inputs)[0]
    assert torch.allclose(output, ours(hidden, inputs)[0], atol=1e-6)
    assert not output[2:, 1].any() and output[:2].any()


def test_what_a_router_lacks_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"Router has no method routing\(logits\)"):
        Router(CONFIG)(torch.zeros(1, 1, 8))
