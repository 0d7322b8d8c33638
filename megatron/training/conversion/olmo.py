"""OLMo 2 and OLMo 3: norms after attention and MLP, and norms of all queries and keys of a token together."""

from megatron.training.conversion.config_rules import Implied, Rule
from megatron.training.conversion.family import Family
from megatron.training.conversion.layer_rules import AttentionHeads, LinearBiases
from megatron.training.conversion.layer_types import RotaryPositionsByLayerType, WindowsByLayerType
from megatron.training.conversion.llama import (
    ATTENTION,
    ENDS,
    EPSILON,
    HEAD_NORMS,
    HUB,
    MLP,
    OURS,
    OUTPUT_BIAS,
    QKV_BIAS,
    SIZES,
    SWIGLU,
    one_to_one,
)
from megatron.training.conversion.rope import RotaryPositions

_NORMS = {
    "post_attention_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_TENSORS = ENDS | ATTENTION | QKV_BIAS | OUTPUT_BIAS | HEAD_NORMS | MLP
_TENSORS |= one_to_one({f"{OURS}.{ours}.weight": f"{HUB}.{hub}.weight" for ours, hub in _NORMS.items()})

_RULES: tuple[Rule, ...] = (
    *SIZES,
    *SWIGLU,
    EPSILON,
    AttentionHeads(),
    LinearBiases(mlp=False),
    Implied({"norm_placement": "post", "qk_layernorm": True, "qk_norm_scope": "full"}),
)

OLMO_FAMILIES = (
    Family("Olmo2ForCausalLM", "olmo2", _TENSORS, (*_RULES, RotaryPositions())),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        _TENSORS,
        (*_RULES, RotaryPositionsByLayerType(500000.0, 500000.0), WindowsByLayerType(period=4)),
    ),
)
