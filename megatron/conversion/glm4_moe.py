"""GLM-4.5: experts chosen by sigmoid scores with a correction, beside shared experts; half of each head rotated."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, deepseek, layer_rules
from megatron.conversion.decoder import HUB, OURS, experts, gated, one_to_one
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import DECODER_DEFAULTS
from megatron.conversion.rope import RotaryPositions

_MLP = ("gate_proj", "up_proj", "down_proj")

GLM4_MOE_FAMILY = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    decoder.AROUND
    | decoder.ATTENTION
    | decoder.QKV_BIAS
    | decoder.HEAD_NORMS
    | decoder.MLP
    | experts("mlp", *_MLP)
    | gated(f"{OURS}.mlp.shared_experts", f"{HUB}.mlp.shared_experts", *_MLP)
    | one_to_one({f"{OURS}.mlp.router.expert_bias": f"{HUB}.mlp.gate.e_score_correction_bias"}),
    (
        *decoder.SIZES,
        *decoder.SWIGLU,
        decoder.EPSILON,
        layer_rules.AttentionHeads(),
        rules.Switch("attention_bias", {"add_qkv_bias": True}),
        RotaryPositions(rotated_part=0.5),
        rules.Copied("use_qk_norm", "qk_layernorm"),
        deepseek.ExpertsAfterDense(),
        deepseek.ExpertsPerToken(),
        deepseek.ExpertGroups(score_topk=2),
        deepseek.NormedProbs(),
        rules.Copied("n_routed_experts", "num_moe_experts"),
        rules.Copied("routed_scaling_factor", "moe_router_topk_scaling_factor", unset=1.0),
        rules.Implied({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
        rules.Unused(("num_nextn_predict_layers",)),  # transformers leaves these layers out too
    ),
    defaults=DECODER_DEFAULTS
    | {
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
    },
    constants=(r"model\.layers\.(46|92)\..*",),
)
