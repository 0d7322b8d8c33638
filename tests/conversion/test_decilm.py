"""Nemotron-NAS models, whose class is not in transformers: its Llama with layers of other sizes computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.oracles import SIZES, Widened, make_model_of, some_tokens
from conversion.saved_models import LLAMA, save_checkpoint
from conversion.test_against_transformers import check_equal, quiet, tensors_of
from conversion.test_remote_code import imported, write
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from megatron.conversion.exporting import export_model
from megatron.conversion.families import family_of
from megatron.core.exceptions import UserError
from pretrain_gpt import build_model

HIDDEN, HEADS = 64, 8
FULL = {"no_op": False, "replace_with_linear": False}
NO_OP = {"no_op": True, "replace_with_linear": False}
LINEAR = {"no_op": False, "replace_with_linear": True}
BLOCKS: list[dict[str, dict[str, Any]]] = [
    {"attention": {"n_heads_in_group": 2} | FULL, "ffn": {"ffn_mult": 6} | FULL},
    {"attention": {"n_heads_in_group": None} | LINEAR, "ffn": {"ffn_mult": None} | NO_OP},
    {"attention": {"n_heads_in_group": None} | NO_OP, "ffn": {"ffn_mult": None} | LINEAR},
    {"attention": {"n_heads_in_group": 8} | FULL, "ffn": {"ffn_mult": 12} | FULL},
]
WIDTHS = {6: 256, 12: 512}
CONFIG = {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "nemotron-nas",
    "block_configs": BLOCKS,
    "intermediate_size": None,
    "num_key_value_heads": None,
    "hidden_size": HIDDEN,
    "num_hidden_layers": len(BLOCKS),
    "num_attention_heads": HEADS,
    "vocab_size": SIZES["vocab_size"],
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "rope_theta": 5000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""Keys as in the published config.json."""


class Nothing(nn.Module):
    """A branch that adds nothing."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


class LinearAttention(nn.Module):
    """One linear layer in place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_attn = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.float64)

    def forward(self, hidden_states: Tensor, **others: object) -> tuple[Tensor, None]:
        return self.linear_attn(hidden_states), None


class LinearMLP(nn.Module):
    """One linear layer in place of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_mlp = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear_mlp(hidden)


class NoAttention(Nothing):
    """No attention."""

    def forward(self, hidden_states: Tensor, **others: object) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.zeros_like(hidden_states), None


def make_oracle() -> Any:
    """A Llama of transformers whose layers have the parts and sizes of `BLOCKS`."""
    settings = {**SIZES, "hidden_size": HIDDEN, "num_hidden_layers": len(BLOCKS), "num_attention_heads": HEADS}
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    model = make_model_of("Llama", settings | {"rms_norm_eps": 1e-4, "rope_parameters": rope}, torch.float64, 3)
    torch.manual_seed(5)
    for index, (layer, block) in enumerate(zip(model.model.layers, BLOCKS, strict=True)):
        own = type(model.config)(**model.config.to_dict())
        own._attn_implementation = model.config._attn_implementation
        if block["attention"]["n_heads_in_group"]:
            own.num_key_value_heads = HEADS // block["attention"]["n_heads_in_group"]
            layer.self_attn = LlamaAttention(own, index).double()
        else:
            linear = block["attention"]["replace_with_linear"]
            layer.self_attn = LinearAttention() if linear else NoAttention()
            layer.input_layernorm = layer.input_layernorm if linear else nn.Identity()
        if block["ffn"]["ffn_mult"]:
            own.intermediate_size = WIDTHS[block["ffn"]["ffn_mult"]]
            layer.mlp = LlamaMLP(own).double()
        else:
            linear = block["ffn"]["replace_with_linear"]
            layer.mlp = LinearMLP() if linear else Nothing()
            layer.post_attention_layernorm = layer.post_attention_layernorm if linear else nn.Identity()
    return model


def test_logits_gradients_and_files(tmp_path: Path) -> None:
    oracle = make_oracle()
    tensors = {key: weight.detach().clone() for key, weight in oracle.named_parameters()}
    assert "model.layers.1.self_attn.linear_attn.weight" in tensors
    ours = imported(write(tmp_path / "theirs", CONFIG, tensors), tmp_path / "ours")
    tokens = some_tokens()
    with Widened():
        expected = oracle(tokens).logits
    logits = ours(tokens)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)
    for outputs in (logits, expected):
        outputs.square().mean().backward()
    wanted = {key: weight.grad for key, weight in oracle.named_parameters()}
    gradients = dict(imported(write(tmp_path / "wanted", CONFIG, wanted), tmp_path / "gradients").named_parameters())
    for key, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[key].detach(), atol=1e-10, rtol=1e-9, msg=key)
    done = export_model(tmp_path / "ours", tmp_path / "back", build_model, log=quiet)
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert done.architecture == "DeciLMForCausalLM" and back.items() >= {**CONFIG, "rope_theta": 5000.0}.items()
    check_equal(tensors_of(tmp_path / "back"), tensors)


def test_sizes_of_flags_and_other_spellings_are_written_as_the_models_have_them(tmp_path: Path) -> None:
    text = '{"block_configs":[{"attention":{"num_query_groups":1},"ffn":{"no_op":true}},{"ffn":{}}]}'
    sizes = "--group-query-attention --num-query-groups 2 --ffn-hidden-size 256"
    root = save_checkpoint(f"{LLAMA} {sizes} --heterogeneous-layers-config-encoded-json {text}", tmp_path / "ours")
    export_model(root, tmp_path / "theirs", build_model, verify=False, log=quiet)
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    heads = config["num_attention_heads"]
    assert [block["attention"]["n_heads_in_group"] for block in config["block_configs"]] == [heads, heads // 2]
    assert config["block_configs"][0]["ffn"]["no_op"] and config["block_configs"][1]["ffn"]["ffn_mult"]


def test_what_is_refused(tmp_path: Path) -> None:
    family = family_of("DeciLMForCausalLM")
    with pytest.raises(UserError, match="block_configs is missing, the list with an entry for each layer"):
        family.fields_of({key: value for key, value in CONFIG.items() if key != "block_configs"})
    text = '{"block_configs":[{"ffn":{"no_op":true}},{}]}'  # a width of 64: multiples of 256 have an ffn_mult
    root = save_checkpoint(
        f"{LLAMA} --ffn-hidden-size 64 --heterogeneous-layers-config-encoded-json {text}", tmp_path / "ours"
    )
    with pytest.raises(UserError, match="heterogeneous-layers-config-encoded-json"):
        export_model(root, tmp_path / "theirs", build_model, verify=False, log=quiet)
