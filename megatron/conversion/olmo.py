"""OLMo 1 (norms without weights), OLMoE, and OLMo 2 and 3: norms after attention and MLP, and norms of all queries and
keys of a token together."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.family import EMBEDDING, HEAD, Family
from megatron.conversion.hub_defaults import DECODER_DEFAULTS
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

_EXPERTS = decoder.experts("mlp", "gate_proj", "up_proj", "down_proj")
_DEFAULTS = DECODER_DEFAULTS | {"vocab_size": 50304, "clip_qkv": None}

OLMO_FAMILIES = (
    Family(
        "OlmoForCausalLM",
        "olmo",
        one_to_one({"embedding.word_embeddings.weight": EMBEDDING, "output_layer.weight": HEAD})
        | decoder.ATTENTION
        | decoder.QKV_BIAS
        | decoder.OUTPUT_BIAS
        | decoder.MLP,
        (
            *decoder.SIZES,
            *decoder.SWIGLU,
            layer_rules.AttentionHeads(),
            layer_rules.LinearBiases(mlp=False),
            RotaryPositions(),
            rules.Copied("clip_qkv", "clip_qkv"),
            rules.Implied({"normalization": "LayerNorm", "norm_affine": False, "layernorm_epsilon": 1e-5}),
        ),
        defaults={key: value for key, value in _DEFAULTS.items() if key != "rms_norm_eps"}
        | {"intermediate_size": 11008},
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        decoder.AROUND | decoder.ATTENTION | decoder.QKV_BIAS | decoder.OUTPUT_BIAS | decoder.HEAD_NORMS | _EXPERTS,
        (
            *decoder.DECODER,
            layer_rules.LinearBiases(mlp=False),
            rules.Fixed("clip_qkv", None),  # it would clip behind the norms of queries and keys
            rules.Copied("num_experts", "num_moe_experts"),
            rules.Copied("intermediate_size", "moe_ffn_hidden_size"),
            layer_rules.RouterWeights(),
            rules.Implied({"qk_layernorm": True, "qk_norm_scope": "full"}),
        ),
        defaults=_DEFAULTS
        | {
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
    Family("Olmo2ForCausalLM", "olmo2", _TENSORS, (*_RULES, RotaryPositions())),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        _TENSORS,
        (*_RULES, RotaryPositionsByLayerType(500000.0, 500000.0), WindowsByLayerType(period=4)),
    ),
)
