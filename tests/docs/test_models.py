"""What docs/models.md says of model options is true of the flags."""

import re
from pathlib import Path

from megatron.training.config.flag_table import flags_by_spelling
from megatron.training.config.retired import RETIRED

MODEL_OPTIONS = {
    "--rope-scaling-type", "--rope-scaling-original-length", "--rope-scaling-low-freq-factor",
    "--rope-scaling-high-freq-factor", "--rope-scaling-beta-fast", "--rope-scaling-beta-slow",
    "--no-rope-scaling-truncate", "--rope-scaling-short-factor", "--rope-scaling-long-factor",
    "--rope-scaling-attention-factor", "--rotary-base-local",
    "--norm-placement", "--no-norm-affine", "--no-norm-bias", "--attention-output-bias", "--no-attention-output-bias",
    "--mlp-bias", "--no-mlp-bias", "--embedding-multiplier", "--embedding-norm", "--residual-multiplier",
    "--logit-scale",
    "--output-layer-bias",
    "--final-logit-softcapping", "--attn-logit-softcapping", "--softmax-scale", "--clip-qkv", "--qk-norm-scope",
    "--qk-l2-norm-epsilon",
    "--no-first-input-norm",
    "--normalize-output-weight",
    "--exact-geglu",
    "--bert-head-activation",
    "--bert-no-head-bias",
    "--attention-chunk-size", "--attention-chunk-skip-freq", "--alibi", "--alibi-factor", "--nope-temperature-scale",
    "--nope-temperature-floor", "--geglu",
    "--moe-router-norm-topk-prob", "--no-moe-router-norm-topk-prob", "--moe-router-bias", "--no-moe-router-bias",
    "--moe-router-group-score-topk", "--moe-expert-mlp-bias", "--no-moe-expert-mlp-bias",
}  # fmt: skip
"""Flags that models need beyond Megatron-LM's fields."""

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[tuple[str, str]]:
    """The cells of the table below a heading."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [(cells[1].strip(), cells[2].strip()) for cells in (line.split("|") for line in lines)]


def test_every_model_option_is_on_the_page() -> None:
    named = [flag for cell, _ in rows("Model options") for flag in re.findall("--[a-z0-9-]+", cell)]
    assert len(named) == len(set(named)) and set(named) == MODEL_OPTIONS


def test_every_flag_on_the_page_is_one() -> None:
    of_budget = {"--params", "--tokens", "--gpus", "--gpu-hours", "--inference-tokens"}  # of tools/budget.py
    assert set(re.findall("--[a-z][a-z0-9-]+", PAGE)) - of_budget <= flags_by_spelling().keys() | RETIRED
