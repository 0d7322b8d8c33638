"""Qwen 2 MoE: the layers of Qwen 2 with experts, and a shared expert with a gate."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, experts, gated
from megatron.conversion.family import Family
from megatron.conversion.glm import QueryKeyValueBias
from megatron.conversion.hub_defaults import HUB_DEFAULTS

_MLP = ("gate_proj", "up_proj", "down_proj")

QWEN2_MOE_FAMILY = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    decoder.AROUND
    | decoder.ATTENTION
    | decoder.QKV_BIAS
    | decoder.MLP
    | experts("mlp", *_MLP)
    | gated(f"{OURS}.mlp.shared_experts", f"{HUB}.mlp.shared_expert", *_MLP)
    | decoder.SHARED_EXPERT_GATE,
    (
        *decoder.DECODER,
        QueryKeyValueBias("qkv_bias"),
        layer_rules.SlidingWindows(by_layer=True, alternate=True),
        rules.Copied("num_experts", "num_moe_experts"),
        rules.Copied("moe_intermediate_size", "moe_ffn_hidden_size"),
        rules.Copied("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", unset=0),
        layer_rules.ExpertLayers(),
        layer_rules.RouterWeights(),
        rules.Implied({"moe_shared_expert_gate": True}),
    ),
    defaults={key: value for key, value in HUB_DEFAULTS["qwen3_moe"].items() if key != "attention_bias"}
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
        "max_window_layers": 28,
        "layer_types": None,
    },
)
