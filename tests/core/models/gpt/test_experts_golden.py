"""The published release's own numbers of two small models with experts: names, logits, losses and every gradient, the
auxiliary losses' part included; with experts one after the other and in grouped products."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

GOLDEN = Path(__file__).parents[3] / "data" / "golden" / "moe_mla"
INFO = json.loads((GOLDEN / "info.json").read_text())
MODELS = ["moe_softmax_auxloss", "moe_sigmoid_group_bias_shared"]


def build(name: str, **settings: object) -> GPTModel:
    described = {**INFO[name]["config"], "activation_func": F.silu} | settings
    config = TransformerConfig(**described)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config,
        spec,
        vocab_size=128,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    weights = load_file(GOLDEN / f"{name}.weights.safetensors")
    if config.moe_grouped_gemm:
        weights = {grouped(key): value for key, value in weights.items()}
    model.load_state_dict(weights)
    return model


def grouped(key: str) -> str:
    """The published name of an expert's weight where the products are grouped."""
    before, found, after = key.partition("local_experts.")
    number, _, rest = after.partition(".")
    return f"{before}{rest}{number}" if found else key


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_of_the_state_dict(name: str) -> None:
    published = {key: shape for key, shape in INFO[name]["state_dict"] if not key.endswith("_extra_state")}
    not_saved = {key for key in published if key.endswith("local_tokens_per_expert")}
    ours = {key: list(value.shape) for key, value in build(name).state_dict().items()}
    assert ours == {key: shape for key, shape in published.items() if key not in not_saved}
    stacked = {key: list(value.shape) for key, value in build(name, moe_grouped_gemm=True).state_dict().items()}
    assert stacked == {grouped(key): shape for key, shape in ours.items()}


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "flex"])
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients(name: str, is_grouped: bool, dispatcher: str) -> None:
    model = build(name, moe_grouped_gemm=is_grouped, moe_token_dispatcher_type=dispatcher)
    io = load_file(GOLDEN / f"{name}.io.safetensors")
    inputs = {"input_ids": io["tokens"], "position_ids": io["position_ids"], "attention_mask": None}
    close("logits", model(**inputs), io["logits"])
    loss = model(**inputs, labels=io["labels"])
    close("loss", loss, io["loss"])
    mask = io["loss_mask"]
    ((loss * mask).sum() / mask.sum()).backward()
    published = load_file(GOLDEN / f"{name}.grads.safetensors")
    gradients = {}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None and is_grouped and ".experts.linear_fc" in key:
            gradients |= {f"{key}{number}": part for number, part in enumerate(parameter.grad)}
        elif parameter.grad is not None:
            gradients[key] = parameter.grad
    assert gradients.keys() == {grouped(key) if is_grouped else key for key in published}
    for key, gradient in published.items():
        close(key, gradients[grouped(key) if is_grouped else key], gradient)


def close(name: str, ours: torch.Tensor, published: torch.Tensor) -> None:
    assert ours.shape == published.shape and ours.dtype == published.dtype, name
    error = (ours - published).abs().max() / published.abs().max()
    assert error < 1e-5, (name, error.item())
