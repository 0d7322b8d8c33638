"""What docs/models.md says of model options is true of the flags, and of the models that tests compare with."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from support.command_lines import configured, problems_of
from support.model_option_cases import CASES, COMMON, Case
from training.config.test_flag_table import MODEL_OPTIONS

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.flag_table import flags_by_spelling
from megatron.training.config.retired import RETIRED

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
R = "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
U = "--untie-embeddings-and-output-weights"


def rows(heading: str) -> list[tuple[str, str]]:
    """The cells of the table below a heading."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [(cells[1].strip(), cells[2].strip()) for cells in (line.split("|") for line in lines)]


MODELS = {name: flags.strip("`") for name, flags in rows("Which models need which")}


def command_line(name: str) -> str:
    words = shlex.split(MODELS[name] if MODELS[name] != "none" else "")
    words = [{"R": R, "U": U}.get(word, word) for word in words if word != "..."]
    base = "--max-position-embeddings 262144 --kv-channels 4" if "longrope" in words else ""
    balance = "--moe-aux-loss-coeff 0.01" if "--num-experts" in words else ""  # part of training, not of the model
    return f"{base} {' '.join(words)} {balance}"


def test_every_model_option_is_on_the_page() -> None:
    named = [flag for cell, _ in rows("Model options") for flag in re.findall("--[a-z0-9-]+", cell)]
    assert len(named) == len(set(named)) and set(named) == MODEL_OPTIONS


def test_every_flag_on_the_page_is_one() -> None:
    of_budget = {"--params", "--tokens", "--gpus", "--gpu-hours", "--inference-tokens"}  # of tools/budget.py
    assert set(re.findall("--[a-z][a-z0-9-]+", PAGE)) - of_budget <= flags_by_spelling().keys() | RETIRED


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_described_by_its_flags(name: str) -> None:
    flags = command_line(name)
    assert problems_of(flags) == []
    config, lone = configured(flags), configured()
    notes = [note for note in config.notes if note not in lone.notes and " replaces " not in note]
    assert not notes, "a flag without effect"


ORACLES = {
    "GPT-NeoX": "GPT-NeoX",
    "Llama 4": "Llama 4, its dense layers",
    "Qwen3-Next": "Qwen3-Next",
    "GLM-4": "GLM-4",
    "Gemma 2B": "Gemma",
    "Gemma 2 9B": "Gemma 2",
    "Gemma 3 4B": "Gemma 3",
    "Phi-3": "Phi-3 longrope of long rows",
    "OLMo": "OLMo",
    "OLMo 2": "OLMo 2",
    "OLMo 3": "OLMo 3",
    "StarCoder2": "StarCoder2",
    "Falcon-RW 1B": "Falcon with ALiBi",
    "Falcon 7B": "Falcon side by side",
    "GPT-OSS": "GPT-OSS",
    "Cohere2": "Cohere2",
}
"""Rows of the page, and the cases that they are held by."""


@pytest.mark.parametrize("name", ORACLES)
def test_a_model_needs_what_its_oracle_needs(name: str) -> None:
    """The flags of a row change the fields that its oracle changes, at other sizes: none too many, none too few."""
    by_flags = turned(configured(command_line(name)).transformer, configured().transformer)
    assert by_flags - EXPERTS == turned_by(CASES[ORACLES[name]]) - EXPERTS


def turned_by(case: Case) -> set[str]:
    sizes = {"num_layers": 4, **COMMON}
    return turned(TransformerConfig(**{**sizes, **case.ours}), TransformerConfig(**sizes))


def turned(config: TransformerConfig, plain: TransformerConfig) -> set[str]:
    names = {field.name for field in dataclasses.fields(TransformerConfig)} - SIZES
    return {name for name in names if getattr(config, name) != getattr(plain, name)}


SIZES = {"ffn_hidden_size", "num_query_groups", "kv_channels", "layernorm_epsilon", "bias_activation_fusion"} | {
    "activation_func",  # exact GELU is one thing by name in the library and another in the app
    "rope_scaling_attention_factor",
    "nope_temperature_floor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_original_length",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
}
EXPERTS = {
    "moe_aux_loss_coeff",
    "num_moe_experts",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_apply_probs_on_input",
} | {
    "moe_shared_expert_intermediate_size",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
}
