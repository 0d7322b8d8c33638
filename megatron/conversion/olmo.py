"""OLMo 1 (norms without weights), OLMoE, and OLMo 2 and 3: norms after attention and MLP, and norms of all queries and
keys of a token together."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import one_to_one
from megatron.conversion.family import EMBEDDING, HEAD, Family
from megatron.conversion.layer_types import RotaryPositionsByLayerType, WindowsByLayerType
from megatron.conversion.rope import RotaryPositions

_NORMS = {
    "post_attention_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_TENSORS = decoder.ENDS | decoder.weights(_NORMS) | decoder.BIASED_ATTENTION | decoder.HEAD_NORMS | decoder.MLP

_RULES: tuple[rules.Rule, ...] = (
    *decoder.BODY,
    layer_rules.ATTENTION_BIASES,
    rules.Implied({"norm_placement": "post", "qk_layernorm": True, "qk_norm_scope": "full"}),
)


OLMO_FAMILIES = (
    Family(
        "OlmoForCausalLM",
        "olmo",
        one_to_one({"embedding.word_embeddings.weight": EMBEDDING, "output_layer.weight": HEAD})
        | decoder.BIASED_ATTENTION
        | decoder.MLP,
        (
            *decoder.SIZES,
            *decoder.SWIGLU,
            layer_rules.AttentionHeads(),
            layer_rules.ATTENTION_BIASES,
            RotaryPositions(),
            rules.Copied("clip_qkv", "clip_qkv"),
            rules.Implied({"normalization": "LayerNorm", "norm_affine": False, "layernorm_epsilon": 1e-5}),
        ),
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        decoder.AROUND | decoder.BIASED_ATTENTION | decoder.HEAD_NORMS | decoder.experts("mlp"),
        (
            *decoder.DECODER,
            layer_rules.ATTENTION_BIASES,
            rules.Fixed("clip_qkv", None),  # it would clip behind the norms of queries and keys
            *rules.copied(num_experts="num_moe_experts", intermediate_size="moe_ffn_hidden_size"),
            layer_rules.RouterWeights(),
            rules.Implied({"qk_layernorm": True, "qk_norm_scope": "full"}),
        ),
    ),
    Family("Olmo2ForCausalLM", "olmo2", _TENSORS, (*_RULES, RotaryPositions())),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        _TENSORS,
        (*_RULES, RotaryPositionsByLayerType(500000.0, 500000.0), WindowsByLayerType(period=4)),
    ),
)
