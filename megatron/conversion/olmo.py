"""OLMo 2 and OLMo 3: norms after attention and MLP, and norms of all queries and keys of a token together."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.family import Family
from megatron.conversion.layer_types import RotaryPositionsByLayerType, WindowsByLayerType
from megatron.conversion.rope import RotaryPositions

_NORMS = {
    "post_attention_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_TENSORS = decoder.ENDS | decoder.ATTENTION | decoder.QKV_BIAS | decoder.OUTPUT_BIAS | decoder.HEAD_NORMS | decoder.MLP
_TENSORS |= one_to_one({f"{OURS}.{ours}.weight": f"{HUB}.{hub}.weight" for ours, hub in _NORMS.items()})

_RULES: tuple[rules.Rule, ...] = (
    *decoder.SIZES,
    *decoder.SWIGLU,
    decoder.EPSILON,
    layer_rules.AttentionHeads(),
    layer_rules.LinearBiases(mlp=False),
    rules.Implied({"norm_placement": "post", "qk_layernorm": True, "qk_norm_scope": "full"}),
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
