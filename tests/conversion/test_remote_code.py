"""Baichuan 2 and ChatGLM 3, whose classes are not in transformers: its Llama and GLM compute the same from renamed
weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.oracles import SIZES, Widened, make_model_of, some_tokens
from conversion.test_against_transformers import check_equal, quiet, tensors_of
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron.conversion.exporting import export_model
from megatron.conversion.families import family_of
from megatron.conversion.importing import import_model
from megatron.core.ops.attention.alibi import alibi_slopes
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model

Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]
HEADS = 6
PLAIN = {**SIZES, "hidden_size": 48, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
BAICHUAN = {
    **{key: PLAIN[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan",
    "vocab_size": 99,
    "rms_norm_eps": 1e-4,
    "model_max_length": 64,
    "tie_word_embeddings": False,
}
CHATGLM = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "num_layers": 3,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "kv_channels": 16,
    "num_attention_heads": 4,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_qkv_bias": True,
    "layernorm_epsilon": 1e-4,
    "seq_length": 64,
    "rope_ratio": 0.5,
    "padded_vocab_size": 99,
    "apply_query_key_layer_scaling": True,
    "attention_softmax_in_fp32": True,
}
"""Keys as in the published config.json."""


def joined(tensors: dict[str, Tensor], name: str, kind: str) -> Tensor:
    return torch.cat([tensors.pop(f"{name}.{part}_proj.{kind}") for part in "qkv"])


def as_baichuan(llama: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a Llama by the names of Baichuan."""
    tensors = dict(llama)
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.W_pack.weight"] = joined(tensors, attention, "weight")
    return tensors


def as_chatglm(glm: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a GLM by the names of ChatGLM."""
    theirs = dict(glm)
    ours = {
        "transformer.embedding.word_embeddings.weight": theirs.pop("model.embed_tokens.weight"),
        "transformer.encoder.final_layernorm.weight": theirs.pop("model.norm.weight"),
        "transformer.output_layer.weight": theirs.pop("lm_head.weight"),
    }
    for layer in range(3):
        hub, block = f"transformer.encoder.layers.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            ours[f"{hub}.self_attention.query_key_value.{kind}"] = joined(theirs, f"{block}.self_attn", kind)
        ours[f"{hub}.self_attention.dense.weight"] = theirs.pop(f"{block}.self_attn.o_proj.weight")
        ours[f"{hub}.mlp.dense_h_to_4h.weight"] = theirs.pop(f"{block}.mlp.gate_up_proj.weight")
        ours[f"{hub}.mlp.dense_4h_to_h.weight"] = theirs.pop(f"{block}.mlp.down_proj.weight")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            ours[f"{hub}.{norm}.weight"] = theirs.pop(f"{block}.{norm}.weight")
    assert not theirs
    return ours


class NormedHead(nn.Module):
    """Baichuan's output layer: the rows of its weight have length 1 in the product."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight * 3.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.weight / self.weight.norm(dim=1, keepdim=True)).t()


def oracle_of(name: str) -> tuple[Any, Rename, dict[str, Any]]:
    """A model of transformers, the function that renames its tensors, and the config of the class it stands for."""
    if name == "chatglm":
        rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
        settings = {**SIZES, "head_dim": 16, "pad_token_id": 0, "attention_bias": True, "rms_norm_eps": 1e-4}
        return make_model_of("Glm", settings | {"rope_parameters": rope}, torch.float64, 4), as_chatglm, CHATGLM
    oracle = make_model_of("Llama", PLAIN | {"rms_norm_eps": 1e-4}, torch.float64, 3)
    oracle.lm_head = NormedHead(oracle.lm_head.weight.detach())
    return oracle, as_baichuan, BAICHUAN | ({"max_position_embeddings": 64} if name == "baichuan 7b" else {})


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def imported(folder: Path, root: Path) -> nn.Module:
    import_model(folder, root, build_model, log=quiet)
    model: nn.Module = load_trained_model(build_model, root, changes=["--fp64"], log=quiet).model
    return model


def alibi_mask(length: int) -> dict[str, Tensor]:
    """Arguments of the oracle: no rotation, and scores that fall with the distance, each head at its own rate."""
    distance = torch.arange(length).view(-1, 1) - torch.arange(length)
    slopes = torch.tensor(alibi_slopes(HEADS), dtype=torch.float64).view(-1, 1, 1)
    mask = torch.where(distance >= 0, -slopes * distance, -torch.inf)
    return {"position_ids": torch.zeros(1, length, dtype=torch.long), "attention_mask": mask.expand(2, -1, -1, -1)}


@pytest.mark.parametrize("name", ["baichuan 7b", "baichuan 13b", "chatglm"])
def test_logits_gradients_and_files(name: str, tmp_path: Path) -> None:
    oracle, rename, config = oracle_of(name)
    tensors = rename({key: weight.detach().clone() for key, weight in oracle.named_parameters()})
    constants = {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)} if name == "chatglm" else {}
    ours = imported(write(tmp_path / "theirs", config, tensors | constants), tmp_path / "ours")
    tokens = some_tokens()
    with Widened():
        expected = oracle(tokens, **(alibi_mask(17) if name == "baichuan 13b" else {})).logits
    logits = ours(tokens)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)

    for outputs in (logits, expected):
        outputs.square().mean().backward()
    wanted = rename({key: weight.grad for key, weight in oracle.named_parameters()})
    gradients = dict(imported(write(tmp_path / "wanted", config, wanted), tmp_path / "gradients").named_parameters())
    for key, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[key].detach(), atol=1e-10, rtol=1e-9, msg=key)

    named = config["architectures"][0]
    export_model(tmp_path / "ours", tmp_path / "back", build_model, architecture=named, log=quiet)
    back = json.loads((tmp_path / "back/config.json").read_text())
    without_effect = ("apply_query_key_layer_scaling", "attention_softmax_in_fp32")
    assert back.items() >= {key: value for key, value in config.items() if key not in without_effect}.items()
    check_equal(tensors_of(tmp_path / "back"), tensors)


def test_baichuan_1_has_a_plain_output_layer() -> None:
    family = family_of("BaichuanForCausalLM")
    assert family.fields_of(BAICHUAN)["normalize_output_weight"]
    assert not family.fields_of(BAICHUAN | {"vocab_size": 64000})["normalize_output_weight"]
