"""Llama, Mistral, Qwen, Mixtral and Granite."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import experts
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import HUB_DEFAULTS
from megatron.conversion.layer_types import WindowsByLayerType
from megatron.conversion.rope import RotaryPositions

LLAMA_FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        decoder.AROUND | decoder.ATTENTION | decoder.QKV_BIAS | decoder.OUTPUT_BIAS | decoder.MLP,
        (
            *decoder.SIZES,
            decoder.EPSILON,
            layer_rules.AttentionHeads(),
            layer_rules.LinearBiases(),
            layer_rules.GatedActivation(),
            rules.Copied("intermediate_size", "ffn_hidden_size"),
            RotaryPositions(),
        ),
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        decoder.AROUND | decoder.ATTENTION | decoder.MLP,
        (*decoder.DECODER, layer_rules.SlidingWindows()),
    ),
    Family(
        "MinistralForCausalLM",
        "ministral",
        decoder.AROUND | decoder.ATTENTION | decoder.MLP,
        (*decoder.DECODER, WindowsByLayerType(period=0)),
        defaults=HUB_DEFAULTS["mistral"] | {"rms_norm_eps": 1e-6, "layer_types": None},
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        decoder.AROUND | decoder.ATTENTION | decoder.QKV_BIAS | decoder.MLP,
        (
            *decoder.DECODER,
            rules.Implied({"add_qkv_bias": True}),
            layer_rules.SlidingWindows(by_layer=True),
            rules.Fixed("use_mrope", False, write=False),
        ),
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        decoder.AROUND | decoder.ATTENTION | decoder.QKV_BIAS | decoder.OUTPUT_BIAS | decoder.HEAD_NORMS | decoder.MLP,
        (
            *decoder.DECODER,
            layer_rules.LinearBiases(mlp=False),
            rules.Implied({"qk_layernorm": True}),
            layer_rules.SlidingWindows(by_layer=True),
        ),
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        decoder.AROUND | decoder.ATTENTION | experts("block_sparse_moe", "w1", "w3", "w2"),
        (
            *decoder.DECODER,
            layer_rules.SlidingWindows(),
            rules.Copied("intermediate_size", "moe_ffn_hidden_size"),
            rules.Copied("num_local_experts", "num_moe_experts"),
            rules.Fixed("router_jitter_noise", 0.0),
            layer_rules.RouterWeights(key=None),
        ),
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        decoder.AROUND
        | decoder.ATTENTION
        | decoder.QKV_BIAS
        | decoder.OUTPUT_BIAS
        | decoder.HEAD_NORMS
        | decoder.MLP
        | experts("mlp", "gate_proj", "up_proj", "down_proj"),
        (
            *decoder.DECODER,
            layer_rules.LinearBiases(mlp=False),
            rules.Implied({"qk_layernorm": True}),
            layer_rules.SwitchedWindows(),
            rules.Copied("num_experts", "num_moe_experts", also="num_local_experts"),
            rules.Copied("moe_intermediate_size", "moe_ffn_hidden_size"),
            layer_rules.ExpertLayers(),
            layer_rules.RouterWeights(),
        ),
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        decoder.AROUND | decoder.ATTENTION | decoder.QKV_BIAS | decoder.OUTPUT_BIAS | decoder.MLP,
        (
            *decoder.DECODER,
            layer_rules.LinearBiases(),
            layer_rules.ScoreScale("attention_multiplier"),
            rules.Copied("embedding_multiplier", "embedding_multiplier"),
            rules.Copied("residual_multiplier", "residual_multiplier"),
            rules.Inverse("logits_scaling", "logit_scale"),
        ),
    ),
)
