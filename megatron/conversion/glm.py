"""GLM-4: half of each head is rotated, in pairs of neighbouring channels; gate and up matrices are one tensor. GLM-4.5:
experts chosen by sigmoid scores with a correction, beside shared experts; half of each head rotated."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, deepseek
from megatron.conversion.family import Family
from megatron.conversion.rope import RotaryPositions

_RULES: tuple[rules.Rule, ...] = (
    *decoder.BODY,
    rules.Switch("attention_bias", {"add_qkv_bias": True}),
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

GLM_FAMILIES = (
    Family("GlmForCausalLM", "glm", decoder.AROUND | _REST, _RULES),
    Family(
        "Glm4ForCausalLM",
        "glm4",
        decoder.ENDS | decoder.weights(_SANDWICH) | _REST,
        (*_RULES, rules.Implied({"norm_placement": "sandwich"})),
    ),
)

GLM4_MOE_FAMILY = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    decoder.AROUND
    | decoder.ATTENTION
    | decoder.QKV_BIAS
    | decoder.HEAD_NORMS
    | decoder.MLP
    | decoder.experts("mlp")
    | decoder.shared_experts("mlp.shared_experts")
    | decoder.expert_bias("mlp.gate.e_score_correction_bias"),
    (
        *decoder.BODY,
        rules.Switch("attention_bias", {"add_qkv_bias": True}),
        RotaryPositions(rotated_part=0.5),
        rules.Copied("use_qk_norm", "qk_layernorm"),
        deepseek.ExpertsAfterDense(),
        deepseek.ExpertGroups(score_topk=2),
        deepseek.NormedProbs(),
        *rules.copied(n_routed_experts="num_moe_experts", num_experts_per_tok="moe_router_topk"),
        rules.Copied("routed_scaling_factor", "moe_router_topk_scaling_factor", unset=1.0),
        rules.Implied({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
        rules.Unused(("num_nextn_predict_layers",)),  # transformers leaves these layers out too
    ),
    constants=(r"model\.layers\.(46|92)\..*",),
)
