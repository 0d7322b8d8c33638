"""Numbers of Megatron-LM's release: names, shapes, logits, losses and gradients of two small models."""

import pytest
import torch.nn.functional as F
from support.golden import Golden, shapes_of

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

MODELS = [Golden("gpt_model", name) for name in ("gpt2style", "llamastyle")]
each_model = pytest.mark.parametrize("golden", MODELS, ids=lambda golden: golden.name)


def build(golden: Golden) -> GPTModel:
    settings = dict(golden.info["config"])
    if settings.get("activation_func") == "torch.nn.functional.silu":
        settings["activation_func"] = F.silu
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **settings
    )
    about = golden.info["model"]
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=32, **about)
    model.load_state_dict(golden.tensors("weights"))
    return model


@each_model
def test_names_and_shapes_of_the_state_dict(golden: Golden) -> None:
    assert shapes_of(build(golden)) == golden.shapes


@each_model
def test_logits_losses_and_gradients(golden: Golden) -> None:
    golden.check_all(build(golden))
