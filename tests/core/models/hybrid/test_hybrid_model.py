"""HybridModel: the ways to give its pattern, and a GPT in its spelling."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config

from megatron.core.exceptions import UserError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid import HybridModel
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.inspection.gpt_spelling import to_hybrid

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8}


def config(**settings) -> TransformerConfig:
    return tiny_config(**{"num_layers": 0, "mamba_head_dim": 4, "mamba_num_groups": 2} | settings)


def hybrid(settings: dict, **keywords) -> HybridModel:
    return HybridModel(config(**settings), hybrid_stack_spec, 37, 8, **keywords)


def gpt(settings: dict, **keywords) -> GPTModel:
    plain = config(**settings)
    spec = get_gpt_decoder_block_spec(plain, False)
    predicting = get_gpt_mtp_block_spec(plain, spec, False)
    return GPTModel(plain, spec, 37, 8, mtp_block_spec=predicting, **keywords)


def test_the_ways_to_give_a_pattern() -> None:
    plain = {"num_layers": 3}
    ratios = {"hybrid_attention_ratio": 0.34, "hybrid_mlp_ratio": 0.33}
    for model, pattern in (
        (hybrid(plain, hybrid_layer_pattern="M-*"), "M-*"),
        (hybrid(plain, hybrid_override_pattern="*-M"), "*-M"),
        (hybrid(plain, **ratios), "M*-"),
        (hybrid({"hybrid_layer_pattern": "-M*"}), "-M*"),
        (hybrid({"hybrid_layer_pattern": "-M*"}, hybrid_layer_pattern="M-*"), "M-*"),
    ):
        assert model.config.hybrid_layer_pattern == pattern and model.config.is_hybrid_model
    assert issubclass(MambaModel, HybridModel)


def test_a_pattern_of_another_length_and_a_spec_that_is_no_function_are_refused() -> None:
    with pytest.raises(UserError, match="has 2 layers"):
        hybrid({"num_layers": 3}, hybrid_layer_pattern="M-")
    with pytest.raises(UserError, match="give hybrid_stack_spec"):
        HybridModel(config(num_layers=2), ModuleSpec(module=object), 37, 8, hybrid_layer_pattern="M-")  # type: ignore


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        ("*-*-", {}),
        ("*E*E", EXPERTS),
        ("*-*E", EXPERTS | {"moe_layer_freq": [0, 1]}),
        ("*-*-/*-/*-", {"mtp_num_layers": 2}),
    ],
)
def test_a_gpt_and_the_pattern_of_its_layers_are_equal_to_the_bit(pattern: str, settings: dict, positions: Any) -> None:
    same = {name: value for name, value in settings.items() if name not in ("moe_layer_freq", "mtp_num_layers")}
    theirs = gpt({"num_layers": 2, **settings}, position_embedding_type=positions)
    ours = hybrid({"hybrid_layer_pattern": pattern, **same}, position_embedding_type=positions)
    ours.load_state_dict({to_hybrid(name): value for name, value in theirs.state_dict().items()})
    ids, labels = torch.randint(37, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    for model in (ours, theirs):
        losses.append(model(ids, labels=labels))
        losses[-1].sum().backward()
    assert torch.equal(*losses)
    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    for name, weight in theirs.named_parameters():
        assert weight.grad is not None and torch.equal(weight.grad, gradients[to_hybrid(name)]), name
