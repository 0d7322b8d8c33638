"""gpt-oss: sinks, windows, and experts whose matrices are transposed and interleaved in one tensor."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.family import Family
from megatron.conversion.layer_types import WindowsByLayerType
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.tensor_mapping import HubTensorPattern

_EXPERTS = f"{HUB}.mlp.experts"

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The scaling of rotary frequencies of the published models, which is that of a config.json without one."""

GPT_OSS_FAMILIES = (
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        decoder.AROUND
        | decoder.BIASED_ATTENTION
        | one_to_one(
            {
                f"{OURS}.self_attention.core_attention.softmax_offset": f"{HUB}.self_attn.sinks",
                f"{OURS}.mlp.router.weight": f"{HUB}.mlp.router.weight",
                f"{OURS}.mlp.router.bias": f"{HUB}.mlp.router.bias",
            }
        )
        | {  # ours: [experts, gate and up, ffn_hidden_size, hidden_size] and [experts, hidden_size, ffn_hidden_size]
            f"{OURS}.mlp.experts.linear_fc1.weight": (
                HubTensorPattern(f"{_EXPERTS}.gate_up_proj", axes=((0,), (3,), (2, 1))),
            ),
            f"{OURS}.mlp.experts.linear_fc1.bias": (
                HubTensorPattern(f"{_EXPERTS}.gate_up_proj_bias", axes=((0,), (2, 1))),
            ),
            f"{OURS}.mlp.experts.linear_fc2.weight": (
                HubTensorPattern(f"{_EXPERTS}.down_proj", axes=((0,), (2,), (1,))),
            ),
            f"{OURS}.mlp.experts.linear_fc2.bias": (HubTensorPattern(f"{_EXPERTS}.down_proj_bias", axes=((0,), (1,))),),
        },
        (
            *decoder.SIZES,
            decoder.EPSILON,
            layer_rules.AttentionHeads(),
            RotaryPositions(absent=YARN),
            layer_rules.ATTENTION_BIASES,
            WindowsByLayerType(period=2),
            rules.Copied("intermediate_size", "ffn_hidden_size"),
            rules.Copied("intermediate_size", "moe_ffn_hidden_size"),
            rules.Copied("num_local_experts", "num_moe_experts"),
            layer_rules.RouterWeights(key=None),
            rules.Copied("swiglu_limit", "activation_func_clamp_value", unset=7.0),
            rules.Fixed("swiglu_alpha", 1.702, write=False),
            rules.Fixed("hidden_act", "silu"),
            rules.Unused(("experts_per_token", "initial_context_length")),  # other names of keys that are there too
            rules.Implied({"quick_geglu": True, "glu_linear_offset": 1.0, "softmax_type": "learnable"}),
            rules.Implied({"moe_router_bias": True, "moe_expert_mlp_bias": True}),
        ),
    ),
)
