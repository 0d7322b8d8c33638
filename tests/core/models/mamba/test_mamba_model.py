"""MambaModel is a GPTModel of the layers that its pattern describes."""

import pytest
import torch
from support.tiny_models import tiny_config

from megatron.core.exceptions import UserError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**settings) -> TransformerConfig:
    sizes = {"num_layers": 3, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 4}
    return tiny_config(**sizes | settings)


def model(settings: dict, **keywords) -> MambaModel:
    return MambaModel(config(**settings), mamba_stack_spec, 37, 8, **keywords)


def parts(of: GPTModel) -> str:
    names = {"MambaMixer": "M", "SelfAttention": "*", "MLP": "-", "IdentityOp": ""}
    return "".join(names[type(part).__name__] for one in of.decoder.layers for part in (one.self_attention, one.mlp))


def test_the_ways_to_give_a_pattern() -> None:
    assert parts(model({"hybrid_layer_pattern": "M-*"})) == "M-*"
    assert parts(model({"is_hybrid_model": True})) == "MMM"
    assert parts(model({"is_hybrid_model": True}, hybrid_override_pattern="*-M")) == "*-M"
    assert parts(model({"is_hybrid_model": True}, hybrid_attention_ratio=0.34, hybrid_mlp_ratio=0.33)) == "M*-"
    with pytest.raises(UserError, match="make it with is_hybrid_model"):
        model({}, hybrid_override_pattern="MMM")


def test_it_computes_what_a_gpt_of_these_layers_does() -> None:
    ids = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
    own = model({"hybrid_layer_pattern": "M-*"})
    spec = mamba_stack_spec(own.config)
    gpt = GPTModel(own.config, spec, 37, 8, position_embedding_type="none")
    gpt.load_state_dict(own.state_dict())
    assert torch.equal(own(ids), gpt(ids))
