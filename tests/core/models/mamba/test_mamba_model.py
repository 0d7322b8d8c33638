"""MambaModel is a GPTModel of the layers that its pattern describes."""

from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**settings) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "mamba_head_dim": 4,
        "mamba_num_groups": 2,
        "num_layers": 3,
    }
    sizes |= {"num_layers": 3, "mamba_state_dim": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerConfig(**sizes | settings, fp64=True)


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


def test_several_tokens_are_predicted_as_in_a_gpt_of_the_same_layers() -> None:
    """An attention layer and an MLP of a hybrid model are one layer of a GPT. `/*-` is one depth with such a layer."""
    hybrid = model({"hybrid_layer_pattern": "*-*-/*-/*-", "num_layers": 0})
    assert hybrid.config.num_layers == 4 and hybrid.config.mtp_num_layers == 2
    plain = config(num_layers=2, mtp_num_layers=2)
    spec = get_gpt_decoder_block_spec(plain, False)
    predicting = get_gpt_mtp_block_spec(plain, spec, False)
    gpt = GPTModel(plain, spec, 37, 8, position_embedding_type="none", mtp_block_spec=predicting)
    weights = hybrid.state_dict()
    for name in gpt.state_dict():
        parts = name.split(".")
        if name.startswith("decoder.layers."):  # layer 1 of the GPT is layers 2 and 3
            second = parts[3] in ("mlp", "pre_mlp_layernorm")
            parts[2] = str(2 * int(parts[2]) + second)
        weights[name] = hybrid.state_dict()[".".join(parts)]
    gpt.load_state_dict({name: weights[name] for name in gpt.state_dict()})
    ids, labels = torch.randint(37, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    for one in (hybrid, gpt):
        one(ids, labels=labels).sum().backward()
    torch.testing.assert_close(hybrid(ids, labels=labels), gpt(ids, labels=labels), rtol=0, atol=1e-12)
    assert hybrid.mtp is not None and gpt.mtp is not None
    for own, theirs in zip(hybrid.mtp.parameters(), gpt.mtp.parameters(), strict=True):
        assert own.grad is not None and theirs.grad is not None and own.grad.abs().sum() > 0
        torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-9, atol=1e-12)
