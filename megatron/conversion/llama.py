"""Llama, Mistral, Qwen, Mixtral and Granite."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS
from megatron.conversion.family import Family
from megatron.conversion.layer_types import WindowsByLayerType
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.tensor_mapping import HubTensorPattern

LLAMA_FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        decoder.LLAMA,
        (
            *decoder.SIZES,
            decoder.EPSILON,
            layer_rules.AttentionHeads(),
            layer_rules.ATTENTION_BIASES,
            layer_rules.MLP_BIASES,
            layer_rules.Words("hidden_act", layer_rules.GATED_ACTIVATIONS),
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
        decoder.LLAMA | decoder.HEAD_NORMS,
        (
            *decoder.DECODER,
            layer_rules.ATTENTION_BIASES,
            rules.Implied({"qk_layernorm": True}),
            layer_rules.SlidingWindows(by_layer=True),
        ),
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        decoder.AROUND | decoder.ATTENTION | decoder.experts("block_sparse_moe", "w1", "w3", "w2"),
        (
            *decoder.DECODER,
            layer_rules.SlidingWindows(),
            *rules.copied(intermediate_size="moe_ffn_hidden_size", num_local_experts="num_moe_experts"),
            rules.Fixed("router_jitter_noise", 0.0),
            layer_rules.RouterWeights(key=None),
        ),
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        decoder.LLAMA | decoder.HEAD_NORMS | decoder.experts("mlp"),
        (
            *decoder.DECODER,
            layer_rules.ATTENTION_BIASES,
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
        decoder.LLAMA,
        (
            *decoder.DECODER,
            layer_rules.ATTENTION_BIASES,
            layer_rules.MLP_BIASES,
            layer_rules.ScoreScale("attention_multiplier"),
            *rules.copied("embedding_multiplier", "residual_multiplier"),
            rules.Inverse("logits_scaling", "logit_scale"),
        ),
    ),
)

QWEN2_MOE_FAMILY = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    decoder.AROUND
    | decoder.ATTENTION
    | decoder.QKV_BIAS
    | decoder.MLP
    | decoder.experts("mlp")
    | decoder.shared_experts("mlp.shared_expert")
    | decoder.SHARED_EXPERT_GATE,
    (
        *decoder.DECODER,
        rules.Switch("qkv_bias", {"add_qkv_bias": True}),
        layer_rules.SlidingWindows(by_layer=True, alternate=True),
        *rules.copied(num_experts="num_moe_experts", moe_intermediate_size="moe_ffn_hidden_size"),
        rules.Copied("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", unset=0),
        layer_rules.ExpertLayers(),
        layer_rules.RouterWeights(),
        rules.Implied({"moe_shared_expert_gate": True}),
    ),
)

_BLOCK = f"{HUB}.block_sparse_moe"

GRANITE_MOE_FAMILY = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    decoder.AROUND
    | decoder.BIASED_ATTENTION
    | {
        f"{OURS}.mlp.router.weight": (HubTensorPattern(f"{_BLOCK}.router.layer.weight"),),
        f"{OURS}.mlp.experts.linear_fc1.weight": (
            HubTensorPattern(f"{_BLOCK}.input_linear.weight", axes=((0,), (1, 2), (3,))),
        ),
        f"{OURS}.mlp.experts.linear_fc2.weight": (
            HubTensorPattern(f"{_BLOCK}.output_linear.weight", axes=((0,), (1,), (2,))),
        ),
    },
    (
        *decoder.DECODER,
        layer_rules.ATTENTION_BIASES,
        layer_rules.ScoreScale("attention_multiplier"),
        *rules.copied("embedding_multiplier", "residual_multiplier"),
        rules.Inverse("logits_scaling", "logit_scale"),
        *rules.copied(intermediate_size="moe_ffn_hidden_size", num_local_experts="num_moe_experts"),
        layer_rules.RouterWeights(key=None),
    ),
)
