"""The published release's own numbers of a small model with latent attention: names, logits, losses, gradients."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.transformer.transformer_config import MLATransformerConfig

GOLDEN = Path(__file__).parents[3] / "data" / "golden" / "moe_mla"
INFO = json.loads((GOLDEN / "info.json").read_text())["mla_rope"]


def build() -> GPTModel:
    config = MLATransformerConfig(**{**INFO["config"], "activation_func": F.silu})
    about = INFO["model"]
    model = GPTModel(
        config,
        gpt_layer_spec_of(config, 1),
        vocab_size=about["vocab"],
        max_sequence_length=about["seq"],
        position_embedding_type=about["position_embedding_type"],
        share_embeddings_and_output_weights=not about["untied"],
    )
    model.load_state_dict(load_file(GOLDEN / "mla_rope.weights.safetensors"))
    return model


def test_names_and_shapes_of_the_state_dict() -> None:
    published = {key: shape for key, shape in INFO["state_dict"] if not key.endswith("_extra_state")}
    ours = {key: list(value.shape) for key, value in build().state_dict().items()}
    assert ours == published


def test_logits_losses_and_gradients() -> None:
    model, io = build(), load_file(GOLDEN / "mla_rope.io.safetensors")
    inputs = {"input_ids": io["tokens"], "position_ids": io["position_ids"], "attention_mask": None}
    close("logits", model(**inputs), io["logits"])
    loss = model(**inputs, labels=io["labels"])
    close("loss", loss, io["loss"])
    mask = io["loss_mask"]
    mean = (loss * mask).sum() / mask.sum()
    close("masked mean", mean, io["masked_mean_loss"][0])
    mean.backward()
    published = load_file(GOLDEN / "mla_rope.grads.safetensors")
    assert {key for key, _ in model.named_parameters()} == set(published)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        close(key, parameter.grad, published[key])


def close(name: str, ours: torch.Tensor, published: torch.Tensor) -> None:
    assert ours.shape == published.shape and ours.dtype == published.dtype, name
    error = (ours - published).abs().max() / published.abs().max()
    assert error < 1e-5, (name, error.item())
