"""GLM-4: half of each head is rotated, in pairs of neighbouring channels; gate and up matrices are one tensor."""

from dataclasses import dataclass
from typing import Any

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import DECODER_DEFAULTS, Json
from megatron.conversion.rope import RotaryPositions


@dataclass(frozen=True)
class QueryKeyValueBias(rules.Rule):
    """A bias of queries, keys and values. The output projection has none."""

    key: str = "attention_bias"

    @property
    def reads(self) -> tuple[str, ...]:
        """The key."""
        return (self.key,)

    def fields(self, config: Json) -> dict[str, Any]:
        """Returns the switch."""
        return {"add_qkv_bias": True} if config[self.key] else {}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the switch."""
        return {self.key: bool(values["add_qkv_bias"])}


_RULES: tuple[rules.Rule, ...] = (
    *decoder.SIZES,
    *decoder.SWIGLU,
    decoder.EPSILON,
    layer_rules.AttentionHeads(),
    QueryKeyValueBias(),
    RotaryPositions(rotated_part=0.5),
    rules.Implied({"rotary_interleaved": True}),
)
_REST = decoder.ATTENTION | decoder.QKV_BIAS | decoder.FUSED_MLP
_SANDWICH = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_mlp_layernorm",
}
_DEFAULTS = DECODER_DEFAULTS | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
}

GLM_FAMILIES = (
    Family("GlmForCausalLM", "glm", decoder.AROUND | _REST, _RULES, defaults=_DEFAULTS),
    Family(
        "Glm4ForCausalLM",
        "glm4",
        decoder.ENDS
        | one_to_one({f"{OURS}.{ours}.weight": f"{HUB}.{hub}.weight" for ours, hub in _SANDWICH.items()})
        | _REST,
        (*_RULES, rules.Implied({"norm_placement": "sandwich"})),
        defaults=_DEFAULTS,
    ),
)
