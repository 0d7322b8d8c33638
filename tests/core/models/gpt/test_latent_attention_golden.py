"""Numbers of Megatron-LM's release of a small model with latent attention: names, logits, losses, gradients."""

import torch.nn.functional as F
from support.golden import Golden, shapes_of

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.transformer.transformer_config import MLATransformerConfig

GOLDEN = Golden("moe_mla", "mla_rope")


def build() -> GPTModel:
    config = MLATransformerConfig(**{**GOLDEN.info["config"], "activation_func": F.silu})
    about = GOLDEN.info["model"]
    model = GPTModel(
        config,
        gpt_layer_spec_of(config, 1),
        vocab_size=about["vocab"],
        max_sequence_length=about["seq"],
        position_embedding_type=about["position_embedding_type"],
        share_embeddings_and_output_weights=not about["untied"],
    )
    model.load_state_dict(GOLDEN.tensors("weights"))
    return model


def test_names_and_shapes_of_the_state_dict() -> None:
    assert shapes_of(build()) == GOLDEN.shapes


def test_logits_losses_and_gradients() -> None:
    GOLDEN.check_all(build())
