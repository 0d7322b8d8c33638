"""Gemma, Gemma 2 and the text models of Gemma 3."""

from dataclasses import dataclass

import torch

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.layer_types import RotaryPositionsByLayerType, WindowsByLayerType
from megatron.conversion.rope import RotaryPositions

_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_TENSORS = decoder.ENDS | decoder.weights(_NORMS) | decoder.BIASED_ATTENTION | decoder.MLP


@dataclass(frozen=True)
class RootOfWidth(rules.Rule):
    """The embedding's output is multiplied by the square root of the hidden size, rounded to float32."""

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the factor."""
        return {"embedding_multiplier": torch.tensor(config["hidden_size"] ** 0.5, dtype=torch.float32).item()}


_EVERY: tuple[rules.Rule, ...] = (
    *decoder.SIZES,
    decoder.EPSILON,
    RootOfWidth(),
    layer_rules.AttentionHeads(),
    layer_rules.ATTENTION_BIASES,
    rules.Copied("intermediate_size", "ffn_hidden_size"),
    rules.Implied({"geglu": True, "layernorm_zero_centered_gamma": True}),
)
_RULES: tuple[rules.Rule, ...] = (
    *_EVERY,
    layer_rules.ScoreScale("query_pre_attn_scalar", query_scalar=True),
    rules.Copied("final_logit_softcapping", "final_logit_softcapping"),
    rules.Fixed("hidden_activation", "gelu_pytorch_tanh", also=("gelu_new",)),
    rules.Implied({"norm_placement": "sandwich"}),
    rules.Unused(("hidden_act", "cache_implementation")),
)

GEMMA_FAMILIES = (
    Family(
        "GemmaForCausalLM",
        "gemma",
        decoder.LLAMA,
        (
            *_EVERY,
            rules.Fixed("hidden_act", "gelu_pytorch_tanh", also=("gelu_new",)),
            rules.Fixed("hidden_activation", "gelu_pytorch_tanh", write=False),
            RotaryPositions(),
            rules.Fixed("use_bidirectional_attention", None, write=False),
        ),
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _TENSORS,
        (
            *_RULES,
            rules.Copied("attn_logit_softcapping", "attn_logit_softcapping"),
            RotaryPositions(),
            WindowsByLayerType(period=2),
            rules.Fixed("use_bidirectional_attention", None, write=False),
        ),
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _TENSORS | decoder.HEAD_NORMS,
        (
            *_RULES,
            rules.NotApplied("attn_logit_softcapping"),
            RotaryPositionsByLayerType(1000000.0, 10000.0, local_key="rope_local_base_freq"),
            WindowsByLayerType(period=6, period_key="sliding_window_pattern"),
            rules.Fixed("use_bidirectional_attention", False),
            rules.Implied({"qk_layernorm": True}),
            rules.Unused(("_sliding_window_pattern",)),
        ),
    ),
)
