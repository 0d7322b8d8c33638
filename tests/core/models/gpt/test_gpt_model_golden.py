"""The published release's own numbers: names, shapes, logits, losses and gradients of two small models."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

GOLDEN = Path(__file__).parents[3] / "data" / "golden" / "gpt_model"
INFO = json.loads((GOLDEN / "info.json").read_text())
MODELS = ["gpt2style", "llamastyle"]


def build(name: str) -> GPTModel:
    settings = dict(INFO[name]["config"])
    if settings.get("activation_func") == "torch.nn.functional.silu":
        settings["activation_func"] = F.silu
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **settings
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=32, **INFO[name]["model"])
    model.load_state_dict(load_file(GOLDEN / f"{name}.weights.safetensors"))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_of_the_state_dict(name: str) -> None:
    published = {key: shape for key, shape in INFO[name]["state_dict"] if not key.endswith("_extra_state")}
    ours = {key: list(value.shape) for key, value in build(name).state_dict().items()}
    assert ours == published


@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients(name: str) -> None:
    model = build(name)
    io = load_file(GOLDEN / f"{name}.io.safetensors")
    inputs = {"input_ids": io["tokens"], "position_ids": io["position_ids"], "attention_mask": None}
    close("logits", model(**inputs), io["logits"])
    loss = model(**inputs, labels=io["labels"])
    close("loss", loss, io["loss"])
    mask = io["loss_mask"]
    mean = (loss * mask).sum() / mask.sum()
    close("masked mean", mean, io["masked_mean_loss"][0])
    mean.backward()
    published = load_file(GOLDEN / f"{name}.grads.safetensors")
    assert {key for key, _ in model.named_parameters()} == set(published)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        close(key, parameter.grad, published[key])


def close(name: str, ours: torch.Tensor, published: torch.Tensor) -> None:
    assert ours.shape == published.shape and ours.dtype == published.dtype, name
    error = (ours - published).abs().max() / published.abs().max()
    assert error < 1e-5, (name, error.item())
