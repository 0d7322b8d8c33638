"""A GPT and the hybrid model of the same layers: `*-*-` is a GPT of two layers, `*E*E` one with experts.

Each layer of a GPT has two branches, attention and MLP, which are two layers of a hybrid model. The weights are the
same under other names, so that each of the two models loads the checkpoints of the other.
"""

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from megatron.core.transformer.layer_patterns import (
    PREDICTION_BORDER,
    STAGE_BORDER,
    has_experts,
    has_rope,
    is_chunked,
    is_windowed,
)
from megatron.core.transformer.transformer_config import TransformerConfig

Values = Mapping[str, Any]
Renaming = Callable[[str], str]
"""Returns the name that the other model has for a tensor, also for one of the optimizer's state."""

_PATTERN = "hybrid_layer_pattern"
_LAYER = re.compile(r"(?<![\w.])((?:[\w.]*\.)?decoder\.layers\.)(\d+)\.(\w+)")
_OF_MLP = ("mlp", "pre_mlp_layernorm", "post_mlp_layernorm")
_OF_ATTENTION: dict[str, Callable[[Any, int], bool]] = {
    "window_attn_skip_freq": is_windowed,
    "attention_chunk_skip_freq": is_chunked,
    "no_rope_freq": has_rope,
}
"""Fields that choose layers by number, and whether an attention layer is chosen."""
_OF_OTHER_MIXERS = ("mamba_", "dsa_", "linear_")
"""Beginnings of fields that a hybrid model describes even if no layer reads them. A GPT whose layers read them has
another `experimental_attention_variant`."""
_GIVEN_WITH = {"window_attn_skip_freq": "window_size", "attention_chunk_skip_freq": "attention_chunk_size"}


def is_gpt_pattern(pattern: str | None) -> bool:
    """Whether a pattern makes the layers of a GPT: pairs of attention and MLP or experts, and depths of multi-token
    prediction that are like the last pair."""
    if not isinstance(pattern, str):  # None, or what a forged checkpoint records
        return False
    decoder, *depths = pattern.replace(STAGE_BORDER, "").split(PREDICTION_BORDER)
    return re.fullmatch(r"(\*[-E])+", decoder) is not None and all(depth == decoder[-2:] for depth in depths)


def in_one_spelling(ours: Values, theirs: Values) -> tuple[Values, Values]:
    """Returns two described architectures (field name -> value) unchanged, or both as those of GPTs if one is a GPT and
    the other the hybrid model of a GPT's layers."""
    return (ours, theirs) if renaming(ours, theirs) is None else (as_gpt(ours), as_gpt(theirs))


def renaming(ours: Values, theirs: Values) -> Renaming | None:
    """Returns how a model of the first architecture names the tensors of one of the second; None if both have the same
    names."""
    here, there = ours.get(_PATTERN), theirs.get(_PATTERN)
    if there is None and theirs and is_gpt_pattern(here):
        return to_hybrid
    if here is None and is_gpt_pattern(there):
        return to_gpt
    return None


def to_hybrid(name: str) -> str:
    """Returns the name in the hybrid model of a tensor of the GPT: layer i becomes layers 2i and 2i + 1."""
    return _LAYER.sub(lambda found: f"{found[1]}{2 * int(found[2]) + (found[3] in _OF_MLP)}.{found[3]}", name)


def to_gpt(name: str) -> str:
    """Returns the name in the GPT of a tensor of the hybrid model."""
    return _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) // 2}.{found[3]}", name)


def as_gpt(architecture: Values) -> Values:
    """Returns the architecture of the GPT that a description of a GPT, or of the hybrid model of its layers, stands
    for. Fields that choose layers by number become lists with an entry for each layer."""
    pattern = architecture.get(_PATTERN)
    known = {name: architecture.get(name) for name in (*_OF_ATTENTION, *_GIVEN_WITH.values(), "num_moe_experts")}
    described = SimpleNamespace(
        **known,
        hybrid_layer_pattern=pattern,
        num_layers=architecture["num_layers"],
        moe_layer_freq=architecture.get("moe_layer_freq", 1),
    )
    run = cast(TransformerConfig, described)
    step = 1 if pattern is None else 2
    firsts = range(1, run.num_layers + 1, step)
    values = {name: value for name, value in architecture.items() if not name.startswith(_OF_OTHER_MIXERS)}
    values |= {
        "num_layers": len(firsts),
        _PATTERN: None,
        "moe_layer_freq": [int(has_experts(run, first + step - 1)) for first in firsts],
    }
    return values | {name: [int(chosen(run, first)) for first in firsts] for name, chosen in _OF_ATTENTION.items()}
