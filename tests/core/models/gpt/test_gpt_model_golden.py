"""Numbers of Megatron-LM's release: names, shapes, logits, losses and gradients of three small models."""

import pytest
import torch.nn.functional as F
from support.golden import Golden, shapes_of
from support.tiny_models import tiny_config

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.transformer.transformer_config import MLATransformerConfig

LATENT = Golden("moe_mla", "mla_rope")
MODELS = [Golden("gpt_model", "gpt2style"), Golden("gpt_model", "llamastyle"), LATENT]
each_model = pytest.mark.parametrize("golden", MODELS, ids=lambda golden: golden.name)


def build(golden: Golden) -> GPTModel:
    settings, about = dict(golden.info["config"]), golden.info["model"]
    if settings.get("activation_func") == "torch.nn.functional.silu":
        settings["activation_func"] = F.silu
    if golden is LATENT:
        config = MLATransformerConfig(**settings | {"activation_func": F.silu})
        tied, positions = not about["untied"], about["position_embedding_type"]
        about = {"position_embedding_type": positions, "share_embeddings_and_output_weights": tied}
    else:
        config = tiny_config(hidden_size=64, fp64=False, **settings)
    model = GPTModel(config, gpt_layer_spec_of(config, 1), vocab_size=128, max_sequence_length=32, **about)
    model.load_state_dict(golden.tensors("weights"))
    return model


@each_model
def test_names_and_shapes_of_the_state_dict(golden: Golden) -> None:
    assert shapes_of(build(golden)) == golden.shapes


@each_model
def test_logits_losses_and_gradients(golden: Golden) -> None:
    golden.check_all(build(golden))
